"""The target engine: texts equal plain decoding under any proposals, page sizes, chunks and batches."""

import numpy as np
import pytest
import torch

from outrider.errors import ConfigError
from outrider.speculation.proposal import FinishReason, Proposal, path_hash
from outrider.speculation.sampling import SamplingParams
from services.target.process.warmup import warm_up
from services.target.speculation.budget import Budget
from services.target.speculation.estimates.step_cost import StepCost
from tests.support.target.driving import (
    GREEDY,
    chain,
    engine_of,
    load_model,
    opening,
    prompts,
    random_tree,
    requests_of,
    run,
)
from tests.support.tiny import VOCAB, write_model

FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {
        "tie_word_embeddings": False,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2": {"tie_word_embeddings": False, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def generate(folder, prompt, count):
    """New tokens of transformers' own greedy decoding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=count,
        min_new_tokens=count, do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


# --- urgent output ---


def test_first_and_last_tokens_and_drafted_ones_are_urgent(model):
    (prompt,) = prompts(1)
    engine = engine_of(model)
    engine.open(opening(1, prompt, GREEDY, max_tokens=12, ignore_eos=True))
    path, urgent = [*prompt], []
    while not engine.idle:
        if len(path) - len(prompt) == 7:  # a drafter answers from here on
            engine.receive([chain(1, path, [5, 6])], ())
        output = engine.step()
        path += [token for commit in output.commits for token in commit.tokens.tolist()]
        urgent += [output.urgent] * sum(len(commit.tokens) for commit in output.commits)
    assert len(urgent) == 12
    assert urgent == [True] + [False] * 6 + [True] * 5


def test_a_negative_coalescing_window_is_refused(model):
    with pytest.raises(ConfigError, match="--coalesce-seconds must be 0 or more, not -1"):
        engine_of(model, coalesce_seconds=-1)


# --- plain decoding is that of transformers ---


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_transformers(family, tmp_path):
    folder = write_model(tmp_path, family, **FAMILIES[family])
    model = load_model(folder)
    texts = prompts(3, longest=40)
    expected = {i: generate(folder, text, 20) for i, text in enumerate(texts, start=1)}
    assert len({token for tokens in expected.values() for token in tokens}) > 10, (
        "the text has too few different tokens to prove anything"
    )
    plain = run(engine_of(model), requests_of(texts, max_tokens=20))
    assert plain.new == expected
    rng = np.random.default_rng(1)
    right = {i: [*text, *expected[i]] for i, text in enumerate(texts, start=1)}

    def proposals(session_id, path):
        ahead = right[session_id][len(path) : len(path) + int(rng.integers(1, 6))]
        return [random_tree(rng, session_id, path, VOCAB, 4), chain(session_id, path, ahead)]

    speculative = run(engine_of(model), requests_of(texts, max_tokens=20), proposals)
    assert speculative.new == expected
    assert speculative.accepted > 20


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (16, 512), (64, 33), (5, 1)])
@pytest.mark.parametrize("count", [1, 8])
def test_pages_chunks_and_batches_do_not_change_the_text(model, page_size, chunk, count):
    texts = prompts(8)
    reference = run(engine_of(model), requests_of(texts[:1])).new[1]
    flags = {"page_size": page_size, "chunked_prefill_size": chunk, "max_running_requests": min(count, 5)}
    result = run(engine_of(model, **flags), requests_of(texts[:count]))
    assert result.new[1] == reference
    assert all(len(tokens) == 24 for tokens in result.new.values())


# --- proposals change only the speed ---


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_proposals_never_change_the_text(model, temperature):
    params = SamplingParams(temperature, top_p=0.95 if temperature == 0.7 else 1.0, seed=42)
    texts = prompts(4)
    plain = run(engine_of(model), requests_of(texts, params))
    assert (plain.verified, plain.accepted, plain.steps) == (0, 0, 24)
    right = {i: [*text, *plain.new[i]] for i, text in enumerate(texts, start=1)}
    rng = np.random.default_rng(3)

    def perfect(session_id, path):
        return [chain(session_id, path, right[session_id][len(path) : len(path) + 7])]

    def garbage(session_id, path):
        return [random_tree(rng, session_id, path, VOCAB, 12)]

    def mixed(session_id, path):
        """Late, repeated and foreign proposals, wrong siblings of accepted tokens, and unknown tokens."""
        truth = right[session_id]
        length = int(rng.integers(1, len(path) + 1))
        late = chain(session_id, truth[:length], truth[length : length + 8], -0.5)
        foreign = chain(session_id, [*path[:-1], 7], [1, 2, 3])
        unknown = chain(session_id, path, [VOCAB, 2**32 - 1])
        offers = [late, late, foreign, unknown, garbage(session_id, path)[0]]
        return [offers[i] for i in rng.permutation(len(offers))[: rng.integers(0, 6)]]

    best = run(engine_of(model, speculative_num_draft_tokens=8), requests_of(texts, params), perfect)
    assert best.new == plain.new
    assert best.steps == 3  # 24 tokens, 8 a step
    assert best.accepted == best.verified == 4 * 21
    for proposals in (garbage, mixed):
        assert run(engine_of(model), requests_of(texts, params), proposals).new == plain.new


@pytest.mark.parametrize("flags", [
    {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 16},
    {"speculative_num_steps": 0}, {"speculative_num_draft_tokens": 1}, {"page_size": 1, "max_running_requests": 2},
])  # fmt: skip
def test_the_shape_of_trees_does_not_change_the_text(model, flags):
    params = SamplingParams(1.0, seed=5)
    texts = prompts(3)
    plain = run(engine_of(model), requests_of(texts, params))
    right = {i: [*text, *plain.new[i]] for i, text in enumerate(texts, start=1)}
    rng = np.random.default_rng(3)

    def proposals(session_id, path):
        ahead = right[session_id][len(path) : len(path) + 5]
        return [random_tree(rng, session_id, path, VOCAB, 20), chain(session_id, path, ahead)]

    result = run(engine_of(model, **flags), requests_of(texts, params), proposals)
    assert result.new == plain.new
    no_drafts = flags.get("speculative_num_steps") == 0 or flags.get("speculative_num_draft_tokens") == 1
    assert (result.verified == 0) == no_drafts


def test_a_chain_is_not_limited_by_num_draft_tokens(model):
    """A chain has --speculative-num-steps draft tokens, whatever --speculative-num-draft-tokens is, as in SGLang."""
    text = prompts(1)[0]
    plain = run(engine_of(model), requests_of([text])).new[1]
    right = [*text, *plain]

    def proposals(session_id, path):
        return [chain(session_id, path, right[len(path) : len(path) + 9])]

    flags = {"speculative_num_steps": 5, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    result = run(engine_of(model, **flags), requests_of([text]), proposals)
    assert result.new[1] == plain
    assert result.steps == len(plain) // 6


def test_a_branch_off_the_best_path_is_compacted(model):
    """The accepted path follows rejected siblings at each depth, so its keys must move, also across pages."""
    text = prompts(1)[0]
    plain = run(engine_of(model), requests_of([text])).new[1]
    right = [*text, *plain]

    def proposals(session_id, path):
        ahead = right[len(path) : len(path) + 4]
        tokens = [token for right_token in ahead for token in ((right_token + 1) % VOCAB, right_token)]
        parents = [-1 if i < 2 else 2 * (i // 2) - 1 for i in range(len(tokens))]
        scores = [-0.01 if i % 2 == 0 else -0.02 for i in range(len(tokens))]
        arrays = np.array(tokens, np.uint32), np.array(parents, np.int32), np.array(scores, np.float32)
        return [Proposal(session_id, len(path), path_hash(np.array(path)), *arrays)]

    result = run(engine_of(model, page_size=2, speculative_num_draft_tokens=9), requests_of([text]), proposals)
    assert result.new[1] == plain
    assert result.steps == 5  # 24 tokens, 5 a step
    assert result.accepted == 24 - 5


def test_many_sessions_share_the_verification_budget(model):
    texts = prompts(20, longest=10)
    plain = run(engine_of(model), requests_of(texts))
    right = {i: [*text, *plain.new[i]] for i, text in enumerate(texts, start=1)}
    engine = engine_of(model)
    engine.speculation.planner.budget = Budget(StepCost({1: 0.01, 60: 0.01, 61: 1.0}))  # 60 tokens are free
    widest = 0

    def proposals(session_id, path):
        nonlocal widest
        widest = max(widest, engine.load().step_tokens if len(path) > len(texts[session_id - 1]) else 0)
        return [chain(session_id, path, right[session_id][len(path) : len(path) + 8])]

    result = run(engine, requests_of(texts), proposals)
    assert result.new == plain.new
    assert (
        result.steps == 9
    )  # 3 tokens of each session in a step, but 1 in the first one, where prompts make tokens expensive
    assert 60 < widest <= sum(len(text) for text in texts)


# --- pages ---


@pytest.mark.parametrize("drafted", [False, True])
def test_a_tiny_pool_preempts_and_loses_nothing(model, drafted):
    texts = prompts(6, longest=30, seed=4)
    params = SamplingParams(0.8, seed=1)
    plain = run(engine_of(model), requests_of(texts, params))
    right = {i: [*text, *plain.new[i]] for i, text in enumerate(texts, start=1)}

    def proposals(session_id, path):
        return [chain(session_id, path, right[session_id][len(path) : len(path) + 7])] if drafted else []

    engine = engine_of(model, page_size=4, max_total_tokens=72)
    result = run(engine, requests_of(texts, params), proposals)
    assert result.new == plain.new
    assert drafted or engine.scheduler.preemptions > 0
    assert set(result.reasons.values()) == {FinishReason.LENGTH}


def test_closing_frees_pages_in_the_middle(model):
    engine = engine_of(model)
    for request in requests_of(prompts(3)):
        engine.open(request)
    engine.step()
    engine.close(2)
    engine.close(99)
    engine.check()
    engine.step()
    engine.close(1)
    engine.close(3)
    assert engine.idle
    engine.scheduler.allocator.check(expected_leased=0)


# --- the end of a session ---


def test_max_tokens_limit_accepted_draft_tokens(model):
    text = prompts(1)[0]
    plain = run(engine_of(model), requests_of([text])).new[1]
    for limit in (1, 2, 5):
        result = run(
            engine_of(model), requests_of([text], max_tokens=limit),
            lambda i, path: [chain(i, path, plain[len(path) - len(text) :][:8])],
        )  # fmt: skip
        assert result.new[1] == plain[:limit]
        assert result.steps == 1
        assert result.accepted == result.verified == limit - 1
        assert result.reasons[1] == FinishReason.LENGTH


# --- opening ---


@pytest.mark.parametrize("flags", [
    {"page_size": 0}, {"max_running_requests": 0}, {"speculative_num_draft_tokens": 0}, {"mem_fraction_static": 0.0},
    {"max_total_tokens": 3},
])  # fmt: skip
def test_limits_that_make_no_sense_are_refused(model, flags):
    with pytest.raises(ConfigError, match=next(iter(flags)).replace("_", "-")):
        engine_of(model, **flags)


def test_warm_up_leaves_nothing_behind(model):
    engine = engine_of(model)
    warm_up(engine)
    assert engine.idle
    assert engine.load().free_pages == engine.load().total_pages
