"""A draft model over several devices has the results of one device, and each device holds its shard alone.

The devices are simulated: see conftest.py.
"""

import jax
import numpy as np
import pytest

from outrider.errors import ConfigError
from outrider.serving.features import FeatureBlock
from outrider.speculation.sampling import SamplingParams
from services.draft.kernels.base import Paging
from services.draft.model.matrices.sharded import ColumnSharded
from services.draft.model.parallel.devices import bytes_a_device
from tests.support.checkpoints.blocks import dflash
from tests.support.checkpoints.heads import MAKERS, write_head
from tests.support.checkpoints.mtp import write_mtp
from tests.support.draft.devices import DEVICES
from tests.support.draft.helpers import GREEDY, commit_of, feature_engine, request, settle, standalone
from tests.support.draft.trees import check_same_tree, tree_of
from tests.support.tiny import VOCAB, write_model

RNG = np.random.default_rng(3)
FEATURES = RNG.standard_normal((200, 48)).astype(np.float32)
PROMPT = RNG.integers(4, VOCAB, 21).tolist()
SAMPLED = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=7)


def engine_of(kind, base, **flags):
    if kind == "llama":
        return standalone(write_model(base / "llama", tie_word_embeddings=False), **flags)
    if kind == "llama, tied, an odd vocabulary":
        return standalone(write_model(base / "odd", tie_word_embeddings=True, vocab=319), **flags)
    target = write_model(base / "target", tie_word_embeddings=False)
    if kind in ("EAGLE3", "DFLASH"):
        made = (MAKERS | {"DFLASH": dflash})[kind](target)
        return feature_engine(kind, write_head(base / kind, *made), target, **flags)
    target = write_mtp(base / kind, kind, layers=3 if kind == "step-3.5" else 1)
    return feature_engine("NEXTN", None, target, speculative_draft_model_path=None, **flags)


# Explicit trees have few shapes to compile. XLA's own operations serve one device as they serve several.
FLAGS = {
    "draft_attention_backend": "plain",
    "speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7,
    "max_running_requests": 1, "draft_page_size": 4, "draft_max_total_tokens": 256,
}  # fmt: skip


def grow(engine, session_id, tokens, fed_until=0):
    """Let an engine settle with features up to the last token; returns its tree."""
    if engine.drafter.features is not None:
        rows = FEATURES[fed_until : len(tokens) - 1]
        engine.receive_features([FeatureBlock(session_id, fed_until, rows.view(np.uint8))])
    settle(engine)
    return tree_of(engine, session_id)


# One of each way of dividing a layer; norms and windows, in which other families differ, are the same on all devices.
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("llama, tied, an odd vocabulary", 4),  # two devices have the same keys and values
        ("EAGLE3", 2),
        pytest.param("deepseek-v3", 4, marks=pytest.mark.long),
        *(pytest.param(kind, 2, marks=pytest.mark.long) for kind in ("DFLASH", "qwen3-next", "mimo-v2", "step-3.5")),
    ],
)
def test_candidates_and_scores_are_those_of_one_device(tmp_path, kind, count):
    one, several = (engine_of(kind, tmp_path / str(n), draft_tp_size=n, **FLAGS) for n in (1, count))
    for session_id, sampling in ((1, GREEDY), (2, SAMPLED)):
        tokens = list(PROMPT)
        for engine in (one, several):
            engine.open(request(session_id, tokens, sampling))
        expected = grow(one, session_id, tokens)
        assert len(expected) >= 6
        check_same_tree(grow(several, session_id, tokens), expected)
        for new in ([*max(expected, key=len)], [5]):  # a path whose rows move, and a token that is not in the tree
            known = len(tokens) - 1
            for engine in (one, several):
                engine.receive([], [commit_of(tokens, new)])
            tokens += new
            expected = grow(one, session_id, tokens, known)
            check_same_tree(grow(several, session_id, tokens, known), expected)
        for engine in (one, several):
            engine.close(session_id)
            engine.check()


def shares(tree):
    """Elements on all devices over those on the first device."""
    leaves = jax.tree.leaves(tree)
    return sum(leaf.nbytes for leaf in leaves) / bytes_a_device(tree)


@pytest.mark.parametrize("kind", ["llama", "EAGLE3", "deepseek-v3"])
def test_each_device_holds_its_shard(tmp_path, kind):
    runner = engine_of(kind, tmp_path, draft_tp_size=2, **FLAGS).drafter.runner
    assert shares(runner.params) > 1.9  # norms and routers lie on both
    assert isinstance(runner.params["head"], ColumnSharded)
    layer = runner.params["layers"][0]
    matrices = (
        {"output", "query", "keys", "values", "experts_down"} if kind == "deepseek-v3" else {"qkv", "output", "down"}
    )
    assert all(shares(layer[name]) == 2 for name in matrices)
    pools = runner.pools
    latent = kind == "deepseek-v3"  # all heads read the same
    assert [shares(pool) for pool in pools.layers] == [1 if latent else 2] * len(pools.layers)
    assert pools.features is None or shares(pools.features) == 2


def test_shared_key_head_is_replicated(tmp_path):
    runner = engine_of("llama", tmp_path, draft_tp_size=4, **FLAGS).drafter.runner
    assert runner.pools.layers[0].shape[1:] == (2, 4, 16)
    assert shares(runner.pools) == 4
    assert bytes_a_device(runner.pools) == runner.pools.layers[0].nbytes // 4 * len(runner.pools.layers)


def test_indivisible_parts_are_replicated(tmp_path, caplog):
    flags = {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "intermediate_size": 97,
        "hidden_size": 51,
        "vocab": 321,
    }
    folder = write_model(tmp_path / "odd", tie_word_embeddings=False, **flags)
    one, several = (standalone(folder, draft_tp_size=n, **FLAGS) for n in (1, 2))
    messages = [record.getMessage() for record in caplog.records if "--draft-tp-size" in record.getMessage()]
    assert messages == [
        f"--draft-tp-size does not divide {name}; all devices compute it" for name in ("attention", "feed-forward")
    ]
    assert shares(several.drafter.runner.params["layers"]) == shares(several.drafter.runner.pools) == 1
    for engine in (one, several):
        engine.open(request(1, PROMPT))
    check_same_tree(grow(several, 1, PROMPT), grow(one, 1, PROMPT))


def test_quantized_matrices_are_sharded(tmp_path):
    flags = FLAGS | {"speculative_draft_model_quantization": "int8"}
    one, several = (engine_of("EAGLE3", tmp_path / str(n), draft_tp_size=n, **flags) for n in (1, 2))
    runner = several.drafter.runner
    assert shares(runner.params) > 1.8
    assert runner.params["head"].part.numbers.dtype == "int8"
    for engine in (one, several):
        engine.open(request(1, PROMPT))
    expected = grow(one, 1, PROMPT)
    assert len(expected) >= 6
    check_same_tree(grow(several, 1, PROMPT), expected)


def test_pallas_kernel_reads_a_devices_shard(tmp_path):
    one, several = (engine_of("EAGLE3", tmp_path / str(n), draft_tp_size=n, **FLAGS) for n in (1, 2))
    runner = several.drafter.runner
    runner.constants = runner.constants._replace(paging=Paging(runner.page_size, "pallas_gpu", interpret=True))
    for engine in (one, several):
        engine.open(request(1, PROMPT))
    expected = grow(one, 1, PROMPT)
    assert len(expected) >= 6
    check_same_tree(grow(several, 1, PROMPT), expected)


def test_serving_compiles_nothing_and_donates_pools(tmp_path):
    engine = engine_of("EAGLE3", tmp_path, draft_tp_size=2, **FLAGS)
    engine.drafter.warm_up()
    runner = engine.drafter.runner
    compiled = runner.compilations.total
    tokens = list(PROMPT)
    engine.open(request(1, tokens))
    grow(engine, 1, tokens)
    for new in ([*max(tree_of(engine, 1), key=len)], [5]):
        before = jax.tree.leaves(runner.pools)
        places = [leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in before]
        known = len(tokens) - 1
        engine.receive([], [commit_of(tokens, new)])
        tokens += new
        grow(engine, 1, tokens, known)
        assert all(leaf.is_deleted() for leaf in before)  # donated
        after = jax.tree.leaves(runner.pools)
        assert [leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in after] == places
    runner.move([(1, 2)])
    assert runner.compilations.total == compiled


def test_missing_devices_are_refused(tmp_path):
    for flags, message in (
        (
            {"draft_tp_size": DEVICES + 1},
            f"--draft-tp-size {DEVICES + 1} need {DEVICES + 1} devices; there are {DEVICES}",
        ),
        ({"draft_tp_size": 2, "draft_device": f"cpu:{DEVICES - 1}"}, f"need {DEVICES + 1} devices"),
    ):
        with pytest.raises(ConfigError, match=message):
            standalone(write_model(tmp_path / "llama"), **flags)


def test_the_first_device_can_be_chosen(tmp_path):
    runner = engine_of("llama", tmp_path, draft_device="cpu:1", draft_tp_size=2, **FLAGS).drafter.runner
    devices = {
        shard.device.id for leaf in jax.tree.leaves((runner.params, runner.pools)) for shard in leaf.addressable_shards
    }
    assert devices == {1, 2}


def test_a_cache_that_fills_a_fraction_of_memory_is_larger_on_several(tmp_path, monkeypatch):
    """Two devices have twice the memory; the weights take as much as before, so more tokens fit."""
    monkeypatch.setattr("services.draft.model.parallel.devices.memory_bytes", lambda _: 1 << 20)
    flags = FLAGS | {"draft_max_total_tokens": None, "draft_mem_fraction_static": 0.5}
    tokens = [
        engine.load().total_pages * 4
        for engine in (engine_of("EAGLE3", tmp_path / str(n), draft_tp_size=n, **flags) for n in (1, 2))
    ]
    assert tokens[1] > 2.1 * tokens[0]
