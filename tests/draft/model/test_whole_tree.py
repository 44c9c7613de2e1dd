"""Whole trees of one program equal trees that grow level by level, node by node and score by score."""

from collections import Counter

import numpy as np
import pytest

from outrider.serving.features import FeatureBlock
from outrider.speculation.proposal import Commit, path_hash
from outrider.speculation.sampling import SamplingParams
from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT
from services.draft.drafters.feature import FeatureDrafter
from services.draft.drafters.model import ModelDrafter
from services.draft.drafters.ngram import NgramDrafter
from services.draft.model.programs.runner import ModelRunner
from tests.support.checkpoints.heads import write_pair
from tests.support.draft.fed_sessions import FEATURES
from tests.support.draft.fed_sessions import FedSession as Session
from tests.support.draft.helpers import GREEDY, feature_engine, settle
from tests.support.tiny import VOCAB

RNG = np.random.default_rng(4)
SHAPES = [(3, 3, 10), (4, 1, 5), (1, 4, 4), (2, 8, 40)]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=5)


@pytest.fixture(scope="module", params=["EAGLE", "EAGLE3"])
def make(request, tmp_path_factory):
    """Makes engines with trees of a shape. whole: False to grow them by levels."""
    target, folder, _ = write_pair(tmp_path_factory.mktemp("heads"), request.param, max_position_embeddings=256)

    def make(shape=(3, 3, 10), *, whole=True, **flags):
        engine = feature_engine(request.param, folder, target, draft_page_size=4, **TreeShape(*shape).flags(), **flags)
        if not whole:
            engine.drafter.grow_by_levels()
        return engine

    return make


def proposals_of(engine):
    """By session: the only proposal since the last commit."""
    found = [p for output in settle(engine) for p in output.proposals if len(p.tokens)]
    assert len({p.session_id for p in found}) == len(found)
    return {p.session_id: p for p in found}


def proposals_through(engine, sampling, sessions=1, commits=4, **options):
    """The proposals of an engine to sessions of some lengths through some commits."""
    proposals = []
    others = [Session(engine, i, 9 + 7 * i, sampling, **options) for i in range(sessions)]
    for session in others:
        session.feed(0)
    for _ in range(commits):
        found = proposals_of(engine)
        proposals += [found.get(i) for i in range(sessions)]
        for session in others:
            session.go_on(found.get(session.number))
    return proposals


def check_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.parents.tolist() == other.parents.tolist()
            assert one.anchor_hash == other.anchor_hash
            np.testing.assert_allclose(one.log_scores, other.log_scores, atol=1e-5)


@pytest.fixture
def grown(monkeypatch):
    """The shapes of all programs that grew whole trees."""
    shapes = []
    grow = ModelRunner.run_tree
    monkeypatch.setattr(
        ModelRunner, "run_tree", lambda self, shape, *rest: shapes.append(shape) or grow(self, shape, *rest)
    )
    return shapes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_whole_trees_equal_trees_by_levels(make, shape, sampling, grown):
    found = proposals_through(make(shape), sampling)
    assert len(grown) == 4
    check_equal(found, proposals_through(make(shape, whole=False), sampling))
    assert len(grown) == 4


def test_whole_trees_of_several_sessions(make, grown):
    found = proposals_through(make(), SAMPLED, sessions=4)
    assert [shape.sessions for shape in grown[-3:]] == [4, 4, 4]  # those before come with prompts
    check_equal(found, proposals_through(make(whole=False), SAMPLED, sessions=4))


@pytest.mark.parametrize(("tokens", "rows"), [(4, [4]), (5, [16]), (16, [16]), (17, [])])
def test_after_a_long_commit(make, grown, tokens, rows):
    """Commits along another drafter's nodes may be long; rows of longer ones are computed in chunks."""
    proposals = []
    for whole in (True, False):
        engine = make(whole=whole)
        session = Session(engine, 1, 40, GREEDY)
        session.feed(0)
        settle(engine)
        grown.clear()
        session.tokens += RNG.integers(4, VOCAB, tokens).tolist() if whole else proposals[0][1]
        text = np.array(session.tokens, np.uint32)
        engine.receive([], [Commit(1, 40, text[40:], path_hash(text))])
        session.feed(40)
        proposals.append(([proposals_of(engine)[1]], session.tokens[40:]))
        assert [shape.rows for shape in grown] == (rows if whole else [])
    check_equal(proposals[0][0], proposals[1][0])


def test_session_that_is_behind_is_served(make, grown):
    """Levels of other sessions are cheaper together, again and again; it gets its turn nevertheless."""
    engine = make()
    others = [Session(engine, i, 9 + 7 * i, GREEDY) for i in range(5)]
    for session in others:
        session.feed(0)
    found = proposals_of(engine)
    behind, *others = others
    behind.tokens += [7, 8, 9, 10, 11, 12]
    text = np.array(behind.tokens, np.uint32)
    engine.drafter.runner.cost = lambda shape: 100.0 if shape.rows == 16 else 0.001
    engine.receive([], [Commit(0, 9, text[9:], path_hash(text))])
    behind.feed(9)
    for _ in range(20):
        for session in others:
            session.go_on(found.get(session.number))
        found = {p.session_id: p for p in engine.step().proposals if len(p.tokens)}
        if 0 in found:
            return
    raise AssertionError("it was never drafted for")


def test_whole_trees_alternate_with_levels(make, grown, monkeypatch):
    """The trees are the same, whichever is cheaper."""
    rng = np.random.default_rng(1)
    best_round = FeatureDrafter.best_round

    def either(drafter, works):
        return (best_round if rng.random() < 0.5 else ModelDrafter.best_round)(drafter, works)

    monkeypatch.setattr(FeatureDrafter, "best_round", either)
    found = proposals_through(make(), SAMPLED, sessions=3, commits=6)
    assert 0 < len(grown) < 15
    check_equal(found, proposals_through(make(whole=False), SAMPLED, sessions=3, commits=6))


def test_the_end_of_a_session_bounds_the_depth(make, grown):
    """Near the end levels grow the trees, no deeper than useful."""
    found = proposals_through(make((5, 2, 12)), GREEDY, max_tokens=9)
    check_equal(found, proposals_through(make((5, 2, 12), whole=False), GREEDY, max_tokens=9))
    assert len(grown) < 3


def test_banned_tokens_are_left_to_levels(make, grown):
    """Whole trees cannot exclude tokens."""
    options = {"min_tokens": 50, "stop_token_ids": tuple(range(0, VOCAB, 2))}
    found = proposals_through(make(), GREEDY, **options)
    assert not grown
    proposed = [token for proposal in found if proposal is not None for token in proposal.tokens.tolist()]
    assert len(proposed) > 3
    assert all(token % 2 for token in proposed)


def test_whole_trees_merge_with_ngram_nodes(make, grown):
    """All nodes of the head's tree are there. The best of all nodes are proposed, and the best that the flags admit."""
    trees, proposals = [], []
    for engine in (make(speculative_ngram_beside=True), make()):
        session = Session(engine, 1, 12, GREEDY)
        session.feed(0)
        settle(engine)
        session.tokens += session.tokens[3:5]  # n-grams know what came next there
        tokens = np.array(session.tokens)
        engine.receive([], [Commit(1, 12, tokens[12:].astype(np.uint32), path_hash(tokens))])
        session.feed(12)
        (proposal,) = [p for output in settle(engine) for p in output.proposals]
        trees.append(engine.running[1].tree)
        proposals.append(proposal)
    assert len(grown) == 4  # two each, the prompt's and the commit's
    tree, alone = trees
    copied = [path_hash(tokens[5:end], tree.root_hash) for end in (6, 7)]
    assert {*alone.hash, *copied} <= set(tree.hash)
    assert not set(copied) <= set(alone.hash)
    assert 9 <= len(proposals[0].tokens) <= 2 * len(proposals[1].tokens) == 18
    best = sorted(range(len(tree)), key=lambda i: -tree.path_score[i])[:9]
    assert Counter(tree.token[i] for i in best) <= Counter(proposals[0].tokens.tolist())


def test_beside_ngrams_roots_alone_are_looked_up(make, monkeypatch):
    """Other nodes do not survive a commit, and their lookups would delay the head."""
    nodes = []
    look_up = NgramDrafter.look_up
    monkeypatch.setattr(
        NgramDrafter, "look_up", lambda self, session, node: nodes.append(node) or look_up(self, session, node)
    )
    engine = make(speculative_ngram_beside=True)
    session = Session(engine, 1, 12, GREEDY)
    session.feed(0)
    settle(engine)
    assert nodes == [ROOT]


def test_partial_features_grow_no_tree(make, grown):
    """A tree below a row before the root would be useless."""
    engine = make()
    session = Session(engine, 1, 12, GREEDY)
    session.feed(0)
    first = proposals_of(engine)[1]
    grown.clear()
    session.tokens += [int(first.tokens[0]), 5, 6]
    before = len(session.tokens) - 3
    tokens = np.array(session.tokens)
    engine.receive([], [Commit(1, before, tokens[before:].astype(np.uint32), path_hash(tokens))])
    engine.receive_features([FeatureBlock(1, before, FEATURES[before : before + 1].view(np.uint8))])
    assert not proposals_of(engine)
    assert not grown
    session.feed(before + 1)
    assert len(proposals_of(engine)[1].tokens) == 9
    assert len(grown) == 1


def test_nothing_compiles_while_whole_trees_grow(make):
    engine = make()
    engine.drafter.warm_up()
    compiled = engine.drafter.runner.compilations.total
    proposals_through(engine, SAMPLED, sessions=3)
    assert engine.drafter.runner.compilations.total == compiled
