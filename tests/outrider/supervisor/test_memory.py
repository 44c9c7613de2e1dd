"""The memory plan before a process runs: from config.json and the headers of weight files, which have no content."""

import pytest

from outrider.checkpoints.sizes import CheckpointSizes
from outrider.config import ServeConfig, parse_flags
from outrider.placement.cores import CorePlan
from outrider.placement.memory import GIB, HEAD_HEADROOM, STANDALONE_HEADROOM
from outrider.supervisor import memory
from outrider.supervisor.app import configure
from outrider.supervisor.dry_run import make_plan
from outrider.supervisor.resolution import resolve_config
from tests.support.checkpoints.headers import write_header, write_qwen
from tests.support.checkpoints.heads import eagle3, write_head
from tests.support.gpu_machine import H100, put_gpus
from tests.support.tiny import write_model

CARD = 80 * 10**9
CORES = CorePlan((0, 1), (2,), (3,))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return write_qwen(tmp_path_factory.mktemp("large") / "model", 5120, 25_600, 64, 64)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_qwen(tmp_path_factory.mktemp("small") / "model", 1024, 3072, 28, 16)


@pytest.fixture
def one_card(monkeypatch):
    """A machine with one GPU, for PyTorch and for JAX."""
    monkeypatch.setattr(memory, "has_gpu", lambda: True)
    monkeypatch.setattr(memory, "gpu_memory", lambda _=0: CARD)
    monkeypatch.setattr(memory, "jax_uses_gpus", lambda: True)


def made(tmp_path, *flags):
    return configure(parse_flags(ServeConfig, flags, "outrider serve"), CORES, tmp_path)


def test_a_32b_checkpoint_fits_on_80_gb_beside_a_small_draft(one_card, tmp_path, large, small):
    flags = ["--model", str(large), "--speculative-algorithm", "STANDALONE", "--speculative-draft-model", str(small)]
    processes = made(tmp_path, *flags)
    plan = memory.plan_of(processes.target, processes.draft)
    assert 64 * 10**9 < plan.weights < 66 * 10**9
    assert plan.token_bytes == 64 * 2 * 8 * 128 * 2
    # The draft's cache would like 64k tokens of 114,688 bytes, 7.5 GB.
    assert STANDALONE_HEADROOM - 114_688 < plan.draft <= STANDALONE_HEADROOM
    assert 8192 < processes.draft.draft_max_total_tokens < 65_536
    assert plan.tokens > 4096
    assert processes.target.draft_headroom_bytes == plan.draft


def test_a_draft_on_another_device_needs_no_headroom(one_card, tmp_path, large, small):
    draft = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model", str(small)]
    for flags in (["--draft-device", "cuda:1"], ["--draft-device", "cpu"], ["--draft-device", "tpu"]):
        processes = made(tmp_path, "--model", str(large), *draft, *flags)
        assert memory.headroom_of(processes.target, processes.draft).bytes == 0
        assert processes.target.draft_headroom_bytes is processes.draft.draft_max_total_tokens is None
    on_first = made(tmp_path, "--model", str(large), *draft, "--device", "cuda:1", "--draft-device", "cuda:1")
    assert memory.headroom_of(on_first.target, on_first.draft).bytes > 0
    ngram = made(tmp_path, "--model", str(large), "--speculative-algorithm", "NGRAM")
    assert memory.headroom_of(ngram.target, ngram.draft).bytes == 0


def test_a_draft_beside_the_target_may_take_its_share_and_no_more(one_card, tmp_path, large, small):
    flags = ["--model", str(large), "--speculative-algorithm", "STANDALONE", "--speculative-draft-model", str(small)]
    shared = made(tmp_path, *flags)
    assert shared.draft.draft_memory_bytes == shared.target.draft_headroom_bytes
    assert made(tmp_path, *flags, "--draft-device", "cuda:1").draft.draft_memory_bytes is None
    assert made(tmp_path, *flags, "--draft-mem-fraction-static", "0.05").draft.draft_memory_bytes is None
    own = made(tmp_path, *flags, "--draft-memory-bytes", str(3 * GIB))
    assert (own.target.draft_headroom_bytes, own.draft.draft_memory_bytes) == (3 * GIB, 3 * GIB)
    assert own.draft.draft_max_total_tokens is None  # the draft fills its share


@pytest.mark.parametrize(
    ("cards", "flags", "device"),
    [
        (2, [], "cuda:1"),
        (2, ["--device", "cuda:1"], "cuda:0"),
        (2, ["--device", "cuda"], "cuda:1"),
        (4, ["--tp-size", "2"], "cuda:2"),
        (4, ["--tp-size", "2", "--draft-tp-size", "2"], "cuda:2,cuda:3"),
        (3, ["--tp-size", "2", "--draft-tp-size", "2"], "auto"),
        (4, ["--device", "cuda:1", "--tp-size", "2", "--draft-tp-size", "2"], "cuda:0,cuda:3"),
        (1, [], "auto"),
        (2, ["--draft-device", "cuda:0"], "cuda:0"),
        (2, ["--draft-device", "cpu"], "cpu"),
        (2, ["--device", "cpu"], "auto"),
        (2, ["--speculative-algorithm", "NGRAM"], "auto"),
    ],
)
def test_a_draft_model_has_a_gpu_of_its_own_where_the_target_leaves_one(monkeypatch, tmp_path, cards, flags, device):
    put_gpus(monkeypatch, tmp_path, *[H100] * cards)
    draft = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model", "some/draft"]
    config = parse_flags(ServeConfig, [*draft, *flags], "outrider serve")
    assert resolve_config(config).draft.draft_device == device
    put_gpus(monkeypatch, tmp_path, *[H100] * cards, plugin=False)
    assert resolve_config(config).draft.draft_device == config.draft.draft_device


def test_other_programs_leave_less(one_card, tmp_path, large):
    processes = made(tmp_path, "--model", str(large))
    free, beside = (memory.plan_of(processes.target, None, taken=taken) for taken in (0, 4 * GIB))
    assert free.kv_bytes - beside.kv_bytes == pytest.approx(4 * GIB, abs=free.token_bytes * 16)


def test_ranks_share_the_devices_that_are_named(one_card, tmp_path, large, small):
    draft = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model", str(small)]
    ranks = ["--tp-size", "2", "--device", "cuda:2,cuda:5"]
    for device, shared in (("cuda:1", False), ("cuda:3", False), ("cuda:5", True)):
        processes = made(tmp_path, "--model", str(large), *draft, *ranks, "--draft-device", device)
        assert bool(memory.headroom_of(processes.target, processes.draft).bytes) is shared
    alone = made(tmp_path, "--model", str(large), "--speculative-algorithm", "NONE")
    whole, half = (memory.plan_of(one.target, None) for one in (alone, processes))
    assert (half.weights, half.token_bytes) == (whole.weights // 2, whole.token_bytes // 2)


def test_every_rank_caches_all_latents(one_card, tmp_path):
    config = {"model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "kv_lora_rank": 16, "qk_rope_head_dim": 8, "vocab_size": 320, "max_position_embeddings": 512}  # fmt: skip
    folder = write_header(tmp_path / "latent", config, {"model.embed_tokens.weight": (320, 64)})
    for size in ("1", "2"):
        processes = made(tmp_path, "--model", str(folder), "--speculative-algorithm", "NONE", "--tp-size", size)
        assert memory.plan_of(processes.target, None).token_bytes == 2 * (16 + 8) * 2


def test_without_a_jax_plugin_the_draft_runs_on_the_cpu(one_card, monkeypatch, tmp_path, large, small):
    monkeypatch.setattr(memory, "jax_uses_gpus", lambda: False)
    flags = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model", str(small)]
    processes = made(tmp_path, "--model", str(large), *flags)
    assert memory.headroom_of(processes.target, processes.draft).bytes == 0


@pytest.mark.parametrize(
    ("algorithm", "headroom"),
    [("STANDALONE", STANDALONE_HEADROOM), ("EAGLE", HEAD_HEADROOM), ("EAGLE3", HEAD_HEADROOM)],
)
def test_an_unknown_draft_gets_the_documented_headroom(one_card, tmp_path, large, algorithm, headroom):
    flags = ["--speculative-algorithm", algorithm, "--speculative-draft-model", "/nowhere/draft"]
    processes = made(tmp_path, "--model", str(large), *flags)
    assert memory.headroom_of(processes.target, processes.draft).bytes == headroom


def test_flags_of_the_draft_limit_its_headroom(one_card, tmp_path, large, small):
    flags = ["--model", str(large), "--speculative-algorithm", "STANDALONE", "--speculative-draft-model", str(small)]

    def headroom(*more):
        processes = made(tmp_path, *flags, *more)
        return memory.headroom_of(processes.target, processes.draft).bytes

    assert headroom("--draft-mem-fraction-static", "0.05") == CARD // 20
    assert headroom("--draft-max-total-tokens", "1000") < headroom() - GIB
    assert headroom("--draft-max-total-tokens", "100000") > headroom() + GIB
    assert made(tmp_path, *flags, "--draft-max-total-tokens", "1000").draft.draft_max_total_tokens == 1000
    int8 = made(tmp_path, *flags, "--speculative-draft-model-quantization", "int8")
    assert int8.draft.draft_max_total_tokens > made(tmp_path, *flags).draft.draft_max_total_tokens
    processes = made(tmp_path, *flags, "--draft-headroom-bytes", "5")
    assert memory.plan_of(processes.target, processes.draft).draft == 5


def test_a_head_needs_the_targets_embedding_too(one_card, tmp_path, large):
    target = write_model(tmp_path / "target", num_hidden_layers=5)
    head = write_head(tmp_path / "head", *eagle3(target))
    flags = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model", str(head)]
    flags += ["--draft-max-total-tokens", "1000"]
    near, far = (made(tmp_path, "--model", str(path), *flags) for path in (target, large))
    difference = memory.headroom_of(far.target, far.draft).bytes - memory.headroom_of(near.target, near.draft).bytes
    assert difference == 2 * (151_936 * 5120 - 320 * 48)  # of bfloat16


def test_sizes_match_what_transformers_loads(tmp_path):
    import transformers

    folder = write_model(tmp_path, "qwen3", num_hidden_layers=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    sizes = CheckpointSizes(folder)
    assert sizes.weights() == sum(parameter.nbytes for parameter in model.parameters())
    assert sizes.weights(2) * 2 == sizes.weights()
    assert sizes.token_bytes(4) == 3 * 2 * 2 * 16 * 4
    assert sizes.weights(4, "int8") < sizes.weights() / 2


def test_a_machine_without_the_checkpoint_has_no_plan(one_card, tmp_path):
    processes = made(tmp_path, "--model", "/nowhere/model")
    assert memory.plan_of(processes.target, processes.draft) is None


def test_a_cpu_has_a_plan_of_its_free_memory(monkeypatch, tmp_path, small):
    monkeypatch.setattr(memory, "has_gpu", lambda: False)
    monkeypatch.setattr(memory, "free_host_memory", lambda: 24 * GIB)
    processes = made(tmp_path, "--model", str(small))
    assert memory.plan_of(processes.target, processes.draft).tokens == 65_536
    monkeypatch.setattr(memory, "free_host_memory", lambda: 2 * GIB)
    assert 2048 < memory.plan_of(processes.target, processes.draft).tokens < 8192


def test_the_dry_run_shows_the_plan(one_card, large, small):
    flags = ["--model", str(large), "--speculative-algorithm", "STANDALONE", "--speculative-draft-model", str(small)]
    plan = make_plan(parse_flags(ServeConfig, flags, "outrider serve"))
    assert "74.51 GiB, weights 61.02, graphs and activations" in plan.memory["target"]
    assert "draft headroom" in plan.memory["target"]
