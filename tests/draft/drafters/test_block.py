"""DFLASH: the programs against a plain twin, the trees of blocks, and the rounds of the drafter."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from outrider.serving.features import FeatureBlock
from outrider.speculation.noise import gumbel
from outrider.speculation.sampling import SamplingParams
from services.draft.drafters.block_tree import BlockLimits, Candidates, best_paths
from services.draft.formats.dflash import read_dflash
from services.draft.formats.target import read_target
from services.draft.kernels.base import Paging
from services.draft.kernels.cpu import library
from services.draft.model.layers.block import block_states, context_pools
from services.draft.model.layers.decoder import all_logits
from services.draft.model.programs.block import block_rows
from services.draft.model.programs.program import Constants, forward_of
from services.draft.sessions.batch import Block, InputLayout, SessionWork, StepBuffer, StepShape, build_inputs
from tests.support.checkpoints.blocks import SECOND, dflash
from tests.support.checkpoints.heads import write_head
from tests.support.draft.helpers import GREEDY, commit_of, feature_engine, request, settle
from tests.support.draft.stepping import PAGE, Stepper
from tests.support.draft.trees import check_same_tree, tree_of
from tests.support.draft.twins.blocks import BlockTwin
from tests.support.tiny import VOCAB, write_model

RNG = np.random.default_rng(5)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("target"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tied_target(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
KINDS = {
    "windows": SLIDING,
    "DFlash 2": SECOND | SLIDING | {"is_causal": False},
    "convolutions of three positions": {"conv_kernel_size": 3, "conv_group_size": 8, "layers": 1, "states": (1,)},
    "windows, not causal": SLIDING | {"is_causal": False},
    "scaled": {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 2.0},
}  # fmt: skip


class BlockStepper(Stepper):
    """Feeds context rows, and computes blocks."""

    def step(self, rows, features, size=None):
        """Feed features; with a size, the logits of the block behind them, [size - 1, V]."""
        shape = StepShape(1, rows, 1, None if size is None else Block(size))
        work = SessionWork(self.session, self.prefix_kv, feed=len(features), features=features)
        layout = InputLayout(shape, 40, self.config.hidden_size)
        inputs = build_inputs(StepBuffer(layout), [work], [])
        constants = Constants(self.config, self.paging, 1, self.config.vocab_size)
        logits, self.pools = jax.jit(_computed, static_argnums=(0, 1))(constants, size, self.params, self.pools, inputs)
        self.prefix_kv.feed(len(features))
        return np.asarray(logits)


def _computed(constants, size, params, pools, inputs):
    forward = forward_of(constants, params, pools, inputs)
    if size is None:
        return jnp.zeros(()), context_pools(forward)
    x, pools = block_states(forward, block_rows(Block(size), constants.config.head, inputs))
    return all_logits(params, x[0, 1:], constants.config.softcap, constants.config.factor), pools


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("windows", "cpu"), ("windows, not causal", "plain"), ("scaled", "plain"), ("DFlash 2", "cpu"),
        ("convolutions of three positions", "plain"),
    ],
)  # fmt: skip
def test_block_equals_the_published_architecture(tmp_path, target, tied_target, kind, backend):
    target = tied_target if kind == "scaled" else target
    config, tensors = dflash(target, **KINDS[kind])
    draft = read_dflash(write_head(tmp_path / "draft", config, tensors), read_target(target))
    library.load()
    twin = BlockTwin(config, tensors, target)
    tokens = RNG.integers(5, VOCAB, 24).tolist()
    features = RNG.standard_normal((40, draft.config.hidden_size)).astype(np.float32)
    model = BlockStepper(draft.config, draft.load(jnp.float32), tokens, Paging(PAGE, backend))

    def check(rows, feed, size):
        start = model.prefix_kv.settled
        found = model.step(rows, features[start : start + feed], size)
        root = int(model.session.tokens[model.prefix_kv.settled])
        expected = twin.logits(root, features[: model.prefix_kv.settled], size)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)

    model.step(32, features[:17])  # a chunk of the prompt, without a block
    check(8, 6, 8)
    for committed in ([7, 8, 9], [11]):  # nothing of earlier blocks is left
        model.commit(committed, ready=False)
        check(8, len(committed), 8)


# --- trees ---


def test_paths_of_a_block_are_the_likeliest():
    tokens = [[1, 2], [3, 4], [5, 6]]
    probs = [[0.6, 0.4], [0.9, 0.1], [0.7, 0.3]]
    scores = [[math.log(p) for p in row] for row in probs]

    def paths(**limits):
        found = Candidates(tokens, [[range(2)]] * 3, [[row] for row in scores])
        ids, parents, edges = best_paths(found, BlockLimits(**({"nodes": 99, "depth": 9} | limits)))
        found = {}
        for token, parent, edge in zip(ids, parents, edges, strict=True):
            above = (list(found)[parent], found[list(found)[parent]]) if parent >= 0 else ((), 1.0)
            found[(*above[0], token)] = above[1] * math.exp(edge)
        return found

    every = {
        path: math.prod(probs[i][tokens[i].index(token)] for i, token in enumerate(path))
        for path in [(a,) for a in (1, 2)] + [(a, b) for a in (1, 2) for b in (3, 4)]
        + [(a, b, c) for a in (1, 2) for b in (3, 4) for c in (5, 6)]
    }  # fmt: skip
    assert paths() == pytest.approx(every)
    best = sorted(every, key=lambda path: -every[path])
    assert list(paths(nodes=5)) == best[:5]
    assert set(paths(path=math.log(0.2))) == {path for path in best if every[path] >= 0.2}
    assert set(paths(edge=math.log(0.35))) == {(1,), (2,), (1, 3), (2, 3), (1, 3, 5), (2, 3, 5)}
    assert set(paths(depth=2)) == {path for path in every if len(path) < 3}
    assert set(paths(ends={3})) == {path for path in every if 3 not in path[:-1]}
    assert paths(depth=0) == {}
    assert paths(nodes=3, ends={1})[(2, 3)] == pytest.approx(0.36)


# --- rounds ---


FEATURES = RNG.standard_normal((300, 48)).astype(np.float32)
FLAGS = {"draft_page_size": 4, "max_running_requests": 4, "precompile_bs_paddings": [4], "disable_radix_cache": False}


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory):
    config, tensors = dflash(target, output_multiplier=10.0)  # sure enough for whole blocks
    folder = write_head(tmp_path_factory.mktemp("draft"), config, tensors)
    return feature_engine("DFLASH", folder, target, **FLAGS), BlockTwin(config, tensors, target)


class Fed:
    """A session whose features come from the test."""

    def __init__(self, engine, number, tokens, sampling=GREEDY):
        self.engine, self.number, self.tokens = engine, number, tokens
        engine.open(request(number, tokens, sampling, max_tokens=99))

    def feed(self, first=0, stop=None):
        rows = FEATURES[first : len(self.tokens) - 1 if stop is None else stop].view(np.uint8)
        self.engine.receive_features([FeatureBlock(self.number, first, rows)])

    def commit(self, new):
        self.engine.receive([], [commit_of(self.tokens, new, self.number)])
        self.tokens = self.tokens + new

    def tree(self):
        return tree_of(self.engine, self.number)


def expected_tree(twin, tokens, seed=None):
    """The tree of the twin's block, as path scores by path. seed: of the noise at temperature 1."""
    states, logits = twin.states_and_logits(tokens[-1], FEATURES[: len(tokens) - 1], 8)
    if seed is not None:
        positions = len(tokens) + np.arange(len(logits))
        logits = logits + gumbel(seed, positions, np.arange(VOCAB))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    count = twin.own.get("selector_top_k", 4)
    ids = np.argsort(-log_p, axis=-1)[:, :count]
    if count == 4:
        edges = np.take_along_axis(log_p, ids, axis=-1)[:, None]
        every = [[range(4)]] * len(ids)
    else:
        above = [[tokens[-1]], *ids[:-1]]
        edges = [
            [twin.corrected(states[i], logits[i], before, count)[1] for before in above[i]] for i in range(len(ids))
        ]
        every = [[np.argsort(-row)[:4].tolist() for row in rows] for rows in edges]
        edges = [[np.sort(row)[::-1][:4] for row in rows] for rows in edges]
    limits = BlockLimits(64, 16, math.log(2e-3), math.log(2e-3), {1})
    found, paths, total = best_paths(Candidates(ids.tolist(), every, edges), limits), [], {}
    for token, parent, edge in zip(*found, strict=True):
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, token))
        total[paths[-1]] = edge + total.get(above, 0.0)
    return total


def test_several_sessions_draft_a_block_behind_each_commit(drafter):
    """Prompts longer than a chunk, features in pieces, commits of every length, one after the other and together."""
    engine, twin = drafter
    prompts = [RNG.integers(5, VOCAB, length).tolist() for length in (150, 7, 2)]
    sessions = [Fed(engine, number, prompt) for number, prompt in enumerate(prompts)]
    sessions[0].feed(0, 70)
    settle(engine)
    assert engine.drafter.prefix_kvs[0].settled == 70
    assert sessions[0].tree() == {}
    sessions[0].feed(70)
    for session in sessions[1:]:
        session.feed()
    outputs = settle(engine)
    assert max(output.load.step_tokens for output in outputs) >= 8, "blocks of several sessions are one step"
    # New tokens behind accepted nodes: none where the tree has the bonus token, too, and some of it survives; a whole
    # block; a commit along another drafter's nodes is longer.
    for new, accepted in ((1, 0), (5, 0), (0, 2), (1, 7), (12, 0), (1, 2)):
        lengths = [len(session.tokens) for session in sessions]
        for session in sessions:
            check_same_tree(session.tree(), expected_tree(twin, session.tokens))
            path = max(session.tree(), key=len)[:accepted]
            session.commit([*path, *RNG.integers(5, VOCAB, new).tolist()])
        settle(engine)
        assert all(session.tree() == {} for session in sessions), "the next block needs the next features"
        for session, length in zip(sessions, lengths, strict=True):
            session.feed(length - 1)
        settle(engine)
    for session in sessions:
        engine.close(session.number)
    engine.check()


def test_blocks_reuse_cached_rows(drafter):
    engine, twin = drafter
    prompt = RNG.integers(5, VOCAB, 41).tolist()
    first = Fed(engine, 10, prompt)
    first.feed()
    settle(engine)
    second = Fed(engine, 11, [*prompt, 7])
    assert engine.drafter.prefix_kvs[11].settled == 40
    second.feed(40)  # the target's features of cached rows need not be sent
    settle(engine)
    check_same_tree(second.tree(), expected_tree(twin, second.tokens))
    for number in (10, 11):
        engine.close(number)


def test_sampled_blocks_use_the_noise_of_their_positions(drafter):
    """At temperature 1 candidates are ranked with the target's noise, which differs by position."""
    engine, twin = drafter
    sampling = SamplingParams(temperature=1.0, seed=3)
    session = Fed(engine, 20, RNG.integers(5, VOCAB, 9).tolist(), sampling)
    session.feed()
    settle(engine)
    check_same_tree(session.tree(), expected_tree(twin, session.tokens, seed=3))
    engine.close(20)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_selector_corrects_candidates_by_the_token_before(target, tmp_path, seed):
    config, tensors = dflash(target, **SECOND)
    twin = BlockTwin(config, tensors, target)
    engine = feature_engine("DFLASH", write_head(tmp_path / "draft", config, tensors), target, **FLAGS)
    sampling = GREEDY if seed is None else SamplingParams(temperature=1.0, seed=seed)
    sessions = [Fed(engine, number, RNG.integers(5, VOCAB, 9).tolist(), sampling) for number in range(2)]
    for session in sessions:
        session.feed()
    settle(engine)
    for session in sessions:
        expected = expected_tree(twin, session.tokens, seed)
        assert max(map(len, expected)) > 2
        check_same_tree(session.tree(), expected)
        engine.close(session.number)


def test_explicit_chains_have_the_size_of_the_block(target, tmp_path):
    config, tensors = dflash(target)
    folder = write_head(tmp_path / "draft", config, tensors)
    engine = feature_engine("DFLASH", folder, target, speculative_num_draft_tokens=5, **FLAGS)
    session = Fed(engine, 1, [5, 6, 7, 8, 9, 10])
    session.feed()
    settle(engine)
    logits = BlockTwin(config, tensors, target).logits(10, FEATURES[:5], 5)
    assert list(session.tree()) == [tuple(logits.argmax(-1)[: i + 1].tolist()) for i in range(4)]
    engine.close(1)
