"""Division of a device's memory, from figures alone."""

import pytest

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.placement.memory import (
    CONTEXT_BYTES,
    GIB,
    HEAD_HEADROOM,
    STANDALONE_HEADROOM,
    draft_cache_tokens,
    draft_share_tokens,
    jax_memory_fraction,
    plan_device,
    plan_host,
)
from outrider.placement.step_sizes import step_sizes

H100 = 80 * 10**9  # less than the card has
# Bytes of bfloat16 weights, and of a token in the KV cache.
QWEN3_32B = (65 * 10**9, 64 * 2 * 8 * 128 * 2)
LLAMA_7B = (13_500_000_000, 32 * 2 * 32 * 128 * 2)


def working(hidden, vocab, **flags):
    return step_sizes(TargetConfig(**flags), hidden, vocab).working_bytes()


@pytest.mark.parametrize("draft", [0, HEAD_HEADROOM, STANDALONE_HEADROOM])
def test_a_32b_model_starts_on_80_gb_without_flags(draft):
    weights, token = QWEN3_32B
    plan = plan_device(H100, weights, token, working=working(5120, 151_936), draft=draft)
    assert plan.tokens > 8192
    assert plan.weights + plan.working + plan.draft + plan.kv_bytes <= H100
    for part in ("weights 60.5", "graphs and activations", "KV cache", f"= {plan.tokens} tokens"):
        assert part in str(plan)
    assert ("draft headroom" in str(plan)) == bool(draft)


def test_fractions_that_hold_no_cache_are_refused_with_the_figures():
    weights, token = QWEN3_32B
    with pytest.raises(
        ConfigError, match=r"--mem-fraction-static 0.8 leaves .* weights take 60.54; raise it, or leave"
    ):
        plan_device(H100, weights, token, working=GIB, fraction=0.8)
    assert plan_device(H100, weights, token, working=GIB, fraction=0.88).tokens > 4096


def test_a_fraction_is_of_weights_and_cache_together():
    weights, token = LLAMA_7B
    plan = plan_device(H100, weights, token, working=GIB, draft=HEAD_HEADROOM, fraction=0.7)
    assert 0 <= 0.7 * H100 - weights - plan.kv_bytes < token * plan.page_size
    assert plan.rule == "--mem-fraction-static 0.7"


def test_a_draft_that_runs_already_is_counted_once():
    weights, token = LLAMA_7B

    def cache(**parts):
        return plan_device(H100, weights, token, working=GIB, **parts).kv_bytes

    page = token * 16
    assert cache(draft=HEAD_HEADROOM) == cache(draft=HEAD_HEADROOM, taken=GIB) == cache(taken=HEAD_HEADROOM)
    assert abs(cache() - cache(taken=4 * GIB, draft=HEAD_HEADROOM) - 4 * GIB) <= page


def test_fewer_graphs_and_sessions_leave_more_for_the_cache():
    usual = working(4096, 128_256)
    rescued = working(4096, 128_256, cuda_graph_max_bs=2, max_running_requests=4)
    fixed = working(4096, 128_256, speculative_num_draft_tokens=16)
    assert working(4096, 128_256, disable_cuda_graph=True) < rescued < usual < fixed
    assert rescued > CONTEXT_BYTES
    assert usual < 4 * GIB


def test_a_card_that_is_too_small_is_refused_with_what_to_do():
    weights, token = QWEN3_32B
    with pytest.raises(ConfigError, match=r"of 44.70 GiB, weights take 60.54, .* --tp-size"):
        plan_device(48 * 10**9, weights, token, working=GIB)
    with pytest.raises(ConfigError, match="--max-total-tokens 15 has no room"):
        plan_device(H100, weights, token, working=GIB, max_total_tokens=15)


def test_a_host_gives_half_of_its_free_memory_at_most_65536_tokens():
    assert plan_host(10**9, 100).tokens == 65_536
    assert plan_host(10**6, 100).tokens == 5_000 // 16 * 16
    assert plan_host(10**6, 100, fraction=0.1).tokens == 992
    assert plan_host(10**6, 100, max_total_tokens=1000, page_size=16).pages == 62
    with pytest.raises(ConfigError, match="max-total-tokens"):
        plan_host(10**6, 100, max_total_tokens=63, page_size=64)


def test_the_drafts_cache_holds_what_sessions_use_within_a_tenth_of_the_memory():
    assert draft_cache_tokens(2048, 8, 100, None) == 8 * (2048 + 64)
    assert draft_cache_tokens(40_960, 48, 100, None) == 65_536 + 48 * 64
    assert draft_cache_tokens(40_960, 48, 1000, 10**8) == 10_000
    assert draft_cache_tokens(40_960, 48, 1000, 10**8, 777) == 777


def test_a_share_holds_weights_context_and_as_many_tokens_as_fit():
    assert draft_share_tokens(3 * GIB, GIB, 40_960, 48, 1 << 20) == 1280  # 0.75 GiB are context and workspaces
    assert draft_share_tokens(30 * GIB, GIB, 2048, 8, 1000) == 8 * (2048 + 64)
    assert draft_share_tokens(GIB, 2 * GIB, 2048, 8, 1000) == 0
    assert jax_memory_fraction(4 * GIB, 80 * GIB) == 0.1
    assert jax_memory_fraction(16 * GIB, 24 * GIB) == 0.75
