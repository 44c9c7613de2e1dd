"""Explicit trees: SGLang's, by a worked vector, against a NumPy twin over random tables, and with models."""

import math

import numpy as np
import pytest

from outrider.config import DraftConfig, ServeConfig, SharedOptions
from outrider.errors import ConfigError
from outrider.serving.features import FeatureBlock, FeatureSpec
from outrider.speculation.proposal import Commit, path_hash
from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import SpeculationTree
from outrider.supervisor.app import check_flags
from services.draft.drafters.base import Drafter, Expansion
from services.draft.drafters.model import expansion_shapes
from services.draft.drafters.ngram import NgramDrafter
from services.draft.engine.engine import DraftEngine
from services.draft.ngrams.base import NgramOptions
from services.draft.process.flags import check, tree_limits
from services.draft.sessions.frontier import TreeLimits
from tests.support.checkpoints.heads import eagle, write_head
from tests.support.draft.helpers import OracleTarget, feature_engine, request, settle, standalone, torch_logits
from tests.support.tiny import VOCAB, write_model


def twin(table, root, shape):
    """Tokens and parents of nodes 1 .. N - 1. table: path -> (ids [K], probabilities [K]), best first."""
    steps, k, rows = shape.steps, shape.topk, shape.rows
    ids, p = table(root)
    flat_ids, scores, parents = list(ids), list(p), list(range(-1, k))
    score, paths = np.array(p), [(*root, i) for i in ids]
    for level in range(1, steps):
        tables = [table(path) for path in paths]
        candidates = score[:, None] * np.array([p for _, p in tables])
        flat_ids += [i for ids, _ in tables for i in ids]
        scores += candidates.ravel().tolist()
        best = np.argsort(-candidates.ravel(), kind="stable")[:k]
        parents += (best + k + k * k * (level - 1)).tolist()
        paths = [(*paths[b // k], tables[b // k][0][b % k]) for b in best]
        score = candidates.ravel()[best]
    selected = np.sort(np.argsort(-np.array(scores), kind="stable")[: rows - 1])
    rank = {flat: place for place, flat in enumerate(selected.tolist())}
    above = [-1 if s // k == 0 else rank[parents[s // k]] for s in selected.tolist()]
    return [flat_ids[s] for s in selected], above


class TableDrafter(Drafter):
    """Expands nodes by a table."""

    name = "TABLE"

    def __init__(self, table, batch=2):
        self.table, self.batch = table, batch
        self.asked = []

    def open(self, session):
        """Nothing to hold."""

    def close(self, session):
        """Nothing to free."""

    def will_commit(self, session, count, path):
        return len(path) == count and path[-1] in session.frontiers[-1].expanded

    def did_commit(self, session, kept):
        """Nothing to renumber."""

    def warm_up(self):
        """Nothing to compile."""

    def expand(self, requests):
        expansions = []
        for session, node, _ in requests[: self.batch]:
            below = [] if node < 0 else session.tree.path_tokens(node)
            path = (*session.tokens.tolist(), *below)
            self.asked.append(path)
            ids, p = self.table(path)
            expansions.append(Expansion(session, node, ids, [-1] * len(ids), [math.log(x) for x in p]))
        return expansions


def engine_of(table, shape, batch=2):
    limits = TreeLimits(max(256, shape.candidates), shape.steps, shape.topk, floor=0.0, shape=shape)
    return DraftEngine(TableDrafter(table, batch), limits, 4)


def proposed(engine, session_id=1):
    """The only proposal since the last commit."""
    (proposal,) = [p for output in settle(engine) for p in output.proposals if p.session_id == session_id]
    return proposal


# --- the twin: flat arrays, as the algorithm is written ---


def test_the_worked_vector():
    tables = {
        (): ([10, 11], [0.6, 0.3]), (10,): ([20, 21], [0.7, 0.2]), (11,): ([22, 23], [0.5, 0.4]),
        (10, 20): ([30, 31], [0.9, 0.05]), (11, 22): ([34, 35], [0.8, 0.1]),
    }  # fmt: skip
    shape = TreeShape(3, 2, 6)
    engine = engine_of(lambda path: tables[path[1:]], shape)
    engine.open(request(1, [99]))
    proposal = proposed(engine)
    assert (proposal.anchor_length, proposal.anchor_hash) == (1, path_hash(np.array([99])))
    assert proposal.tokens.tolist() == [10, 11, 20, 22, 30]
    assert proposal.parents.tolist() == [-1, -1, 0, 1, 2]
    scores = np.exp(proposal.log_scores)
    np.testing.assert_allclose(scores, [0.6, 0.3, 0.7, 0.5, 0.9], rtol=1e-6)
    tree = SpeculationTree(np.array([99]))
    tree.merge(proposal)
    assert tree.depth == [1, 1, 2, 2, 3]
    assert len(tree.select(5, 3, 2)) == 5  # the target verifies all of them


def random_table(seed, k, ties=False):
    """A table that depends on the path alone; with ties, many paths are equally likely, and certain ones occur."""

    def table(path):
        rng = np.random.default_rng([seed, *path])
        ids = rng.choice(1000, k, replace=False).tolist()
        if ties:
            p = rng.choice([[1.0] + [2.0**-9] * (k - 1), [0.5] * k, [0.25] * k])
        else:
            p = np.sort(rng.dirichlet(np.full(k + 1, 0.5))[:k])[::-1]
        return ids, p.tolist()

    return table


@pytest.mark.parametrize("ties", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("shape", [(3, 2, 6), (5, 8, 64), (4, 4, 16), (1, 4, 4), (6, 1, 7), (2, 10, 60), (8, 3, 4)])
def test_trees_equal_the_twin(shape, ties):
    """Through commits that follow the tree to its end, leave it halfway, or miss it."""
    shape = TreeShape(*shape)
    rng = np.random.default_rng(0)
    table = random_table(sum(shape.__dict__.values()), shape.topk, ties)
    engine = engine_of(table, shape, batch=3)
    tokens = [1, 2, 3]
    engine.open(request(1, tokens, max_tokens=1000))
    for _ in range(8):
        proposal = proposed(engine)
        assert (proposal.tokens.tolist(), proposal.parents.tolist()) == twin(table, tuple(tokens), shape)
        assert proposal.anchor_length == len(tokens)
        tree = SpeculationTree(np.array(tokens))
        tree.merge(proposal)
        path = tree.path_tokens(int(rng.integers(len(tree))))[: int(rng.integers(shape.steps + 1))]
        new = path if path and rng.random() < 0.5 else [*path, 5000]
        tokens += new
        base = len(tokens) - len(new)
        engine.receive([], [Commit(1, base, np.array(new, np.uint32), path_hash(np.array(tokens)))])
    assert len(set(engine.drafter.asked)) == len(engine.drafter.asked)  # what is known is not asked again


def test_the_end_of_a_session_bounds_the_depth():
    shape = TreeShape(4, 2, 8)
    engine = engine_of(random_table(0, 2), shape)
    engine.open(request(1, [1, 2], max_tokens=3))
    proposal = proposed(engine)
    assert (proposal.tokens.tolist(), proposal.parents.tolist()) == twin(random_table(0, 2), (1, 2), TreeShape(2, 2, 7))
    engine.close(1)
    engine.open(request(2, [1, 2], max_tokens=1))
    assert [o.proposals for o in settle(engine)] == []


def test_no_proposal_before_the_tree_is_complete():
    """An empty proposal would let the target stop waiting."""
    shape = TreeShape(4, 2, 8)
    engine = engine_of(random_table(3, 2), shape, batch=1)
    engine.open(request(1, [1, 2]))
    settle(engine)
    engine.receive([], [Commit(1, 2, np.array([7], np.uint32), path_hash(np.array([1, 2, 7])))])
    outputs = settle(engine)
    assert [len(output.proposals) for output in outputs] == [0] * (len(outputs) - 1) + [1]
    assert len(outputs) == 1 + shape.expansions


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llama"))


PROMPT = np.random.default_rng(2).integers(4, VOCAB, 23).tolist()
FLAGS = {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 10}


# --- with models ---


def test_a_model_grows_the_tree_of_its_probabilities(model):
    """Also after commits that move rows, and where rounds have shapes of their own."""

    next_logits = torch_logits(model)

    def table(path):
        logits = next_logits(list(path)).astype(np.float64)
        p = np.exp(logits - logits.max())
        best = np.argsort(-p, kind="stable")[:3]
        return best.tolist(), (p[best] / p.sum()).tolist()

    engine = standalone(model, **FLAGS)
    opened = request(1, PROMPT)
    engine.open(opened)
    target = OracleTarget(next_logits, opened, budget=9)
    for _ in range(4):
        outputs = settle(engine)
        (proposal,) = [p for output in outputs for p in output.proposals]
        shape = TreeShape(3, 3, 10)
        assert (proposal.tokens.tolist(), proposal.parents.tolist()) == twin(table, tuple(target.tokens), shape)
        for output in outputs:
            target.hear(output)
        commit = target.step()
        assert commit.verified == 9
        engine.receive([], [commit])


def feed(engine, first, features):
    rows = np.ascontiguousarray(features, np.float32).view(np.uint8)
    engine.receive_features([FeatureBlock(1, first, rows)])


def test_explicit_trees_grow_on_true_features_alone(tmp_path, model):
    """Children of a committed node were computed from the head's own features, and are dropped."""
    folder = write_head(tmp_path / "head", *eagle(model))
    engine = feature_engine("EAGLE", folder, model, **FLAGS)
    features = np.random.default_rng(4).standard_normal((40, engine.drafter.runner.feature_width))
    engine.open(request(1, PROMPT))
    feed(engine, 0, features[:23])
    proposal = proposed(engine)
    assert len(proposal.tokens) == 9
    tree = SpeculationTree(np.array(PROMPT))
    tree.merge(proposal)
    tokens = [*PROMPT, *tree.path_tokens(tree.depth.index(3))]
    new = np.array(tokens[23:], np.uint32)
    engine.receive([], [Commit(1, 23, new, path_hash(np.array(tokens)))])
    assert [p for output in settle(engine) for p in output.proposals] == []
    feed(engine, 23, features[23:26])
    proposal = proposed(engine)
    fresh = feature_engine("EAGLE", folder, model, **FLAGS)
    fresh.open(request(1, tokens))
    feed(fresh, 0, features[:26])
    expected = proposed(fresh)
    assert proposal.tokens.tolist() == expected.tokens.tolist()
    assert proposal.parents.tolist() == expected.parents.tolist()
    assert proposal.anchor_hash == expected.anchor_hash


def test_nothing_compiles_while_trees_grow(model):
    engine = standalone(model, **FLAGS)
    engine.drafter.warm_up()
    compiled = engine.drafter.runner.compilations.total
    for session_id in range(4):
        engine.open(request(session_id, PROMPT * (1 + 3 * session_id)))
    settle(engine)
    assert engine.drafter.runner.compilations.total == compiled


def nodes_of(engine):
    """The paths that an engine proposes once it has settled."""
    paths = []
    for proposal in [proposal for output in settle(engine) for proposal in output.proposals]:
        for token, parent in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


@pytest.mark.parametrize(("steps", "topk", "count"), [(5, 4, 8), (9, 8, 32)])
def test_tree_after_commits_equals_that_of_a_new_engine(model, steps, topk, count):
    """Nodes that survive commits are reused, and take no more scratch slots than there are."""
    flags = {"speculative_num_steps": steps, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": count}
    grown, fresh = (standalone(model, draft_max_total_tokens=4096, **flags) for _ in range(2))
    rng, tokens = np.random.default_rng(0), list(PROMPT)
    grown.open(request(1, tokens, max_tokens=1000))
    for _ in range(14):
        fresh.open(request(1, tokens, max_tokens=1000))
        found = nodes_of(grown)
        assert found == nodes_of(fresh)
        tree, node, new = grown.running[1].tree, -1, []
        for _ in range(rng.integers(1, 4)):
            if not (children := sorted(tree.children_of(node), key=lambda i: -tree.log_score[i])[:3]):
                break
            node = int(rng.choice(children))
            new.append(tree.token[node])
        tokens += new
        commit = Commit(1, len(tokens) - len(new), np.array(new, np.uint32), path_hash(np.array(tokens)))
        grown.receive([], [commit])


class WrongHead(Drafter):
    """A head with whole trees of three tokens that are never accepted."""

    name, features = "EAGLE3", FeatureSpec(final=True)

    def open(self, session):
        """Nothing to hold."""

    def close(self, session):
        """Nothing to free."""

    def will_commit(self, session, count, path):
        return False

    def did_commit(self, session, kept):
        """Nothing to renumber."""

    def warm_up(self):
        """Nothing to compile."""

    def expand(self, requests):
        tree = [300, 301, 302], [-1, -1, -1], [-0.7, -1.5, -2.5]
        return [Expansion(asked.session, -1, *tree, whole=True) for asked in requests]


def test_each_node_has_the_drafter_that_proposed_it():
    limits = TreeLimits(512, 16, 512, floor=0.0, shape=TreeShape(1, 3, 9))
    engine = DraftEngine(WrongHead(), limits, 4, beside=NgramDrafter(NgramOptions()))
    cycle = [10, 11, 12, 13, 14, 15]
    tokens = cycle * 4
    engine.open(request(1, tokens, max_tokens=1000))
    for _ in range(20):
        settle(engine)
        session = engine.sessions[1]
        drafted = [session.tree.token[node] >= 300 for node in range(len(session.tree))]
        assert [bool(origin) for origin in session.grower.origin] == drafted
        new = [cycle[(len(tokens) + i) % 6] for i in range(2)]
        tokens += new
        engine.receive([], [Commit(1, len(tokens) - 2, np.array(new, np.uint32), path_hash(np.array(tokens)))])


def test_rounds_fit_a_level():
    rows = {shape.rows for shape in expansion_shapes(4, TreeShape(5, 8, 32))}
    assert rows == {6, 8}


def config(**flags):
    return DraftConfig(speculative_algorithm="STANDALONE", speculative_draft_model_path="m", **flags)


# --- flags ---


def test_flags_that_do_not_fit(model):
    with pytest.raises(ConfigError, match="expand 70 nodes"):
        check(config(speculative_num_steps=8, speculative_eagle_topk=10, speculative_num_draft_tokens=60))
    serve = ServeConfig(shared=SharedOptions(speculative_num_steps=3), draft=config())
    with pytest.raises(ConfigError, match="set all three"):
        check_flags(serve)


def test_chain_length_follows_the_steps(caplog):
    limits = tree_limits(config(speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=8))
    assert limits.shape == TreeShape(3, 1, 4)
    assert "--speculative-num-draft-tokens 8 becomes 4" in caplog.text
