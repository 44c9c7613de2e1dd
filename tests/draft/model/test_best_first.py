"""Adaptive trees of which one program grows several levels equal those that grow a round at a time."""

import pytest

from outrider.speculation.sampling import SamplingParams
from services.draft.model.programs.runner import ModelRunner
from services.draft.sessions.batch import Growth, StepShape
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS
from tests.support.checkpoints.heads import write_pair
from tests.support.draft.fed_sessions import FedSession
from tests.support.draft.helpers import GREEDY, feature_engine, settle
from tests.support.draft.trees import check_same_tree, tree_of

WIDTH, ROUNDS = 3, 3
GROWTH = Growth(ROUNDS, WIDTH)
ROUND_BY_ROUND = [StepShape(sessions, WIDTH, WIDTH) for sessions in (1, 4)]
SAMPLED = SamplingParams(temperature=0.8, top_k=2, seed=5)  # leaves fewer than WIDTH possible children


@pytest.fixture(scope="module", params=["EAGLE", "EAGLE3"])
def make(request, tmp_path_factory):
    """Makes engines whose rounds expand WIDTH nodes. growth: of several levels in one program, or None."""
    target, folder, _ = write_pair(tmp_path_factory.mktemp("heads"), request.param, max_position_embeddings=256)

    def make(growth=GROWTH, **flags):
        engine = feature_engine(request.param, folder, target, draft_page_size=4, **flags)
        engine.drafter.set_expansion_shapes(ROUND_BY_ROUND)
        engine.drafter.grow_by_levels()
        if growth is not None:
            engine.drafter.set_growth([StepShape(sessions, 8, 1, growth) for sessions in (1, 4)])
        return engine

    return make


@pytest.fixture
def calls(monkeypatch):
    """The shapes of all programs that ran."""
    shapes = []
    run = ModelRunner._run
    monkeypatch.setattr(ModelRunner, "_run", lambda self, shape, *rest: shapes.append(shape) or run(self, shape, *rest))
    return shapes


def likely(engine, session):
    """The nodes that may be proposed, as path scores by path."""
    floor = engine.limits.log_floor + 1e-3
    return {path: score for path, score in tree_of(engine, session.number).items() if score > floor}


def course(engine, sampling, sessions=1, commits=3, **options):
    """All trees of some sessions: after features, and after commits whose features are still to come."""
    trees = []
    others = [FedSession(engine, i, 9 + 7 * i, sampling, **options) for i in range(sessions)]
    for session in others:
        session.feed(0)
    for number in range(commits):
        settle(engine)
        trees += [likely(engine, session) for session in others]
        firsts = []
        for session in others:
            paths = sorted(path for path in trees[session.number - sessions] if len(path) <= 1 + number)
            firsts.append(session.commit([*paths[number % len(paths)]]))
        settle(engine)
        trees += [likely(engine, session) for session in others]
        for session, first in zip(others, firsts, strict=True):
            session.feed(first)
    return trees


def check_same(found, expected):
    assert max(map(len, expected)) > 10, "small trees prove little"
    for one, other in zip(found, expected, strict=True):
        check_same_tree(one, other)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("sessions", [1, 4])
def test_several_levels_equal_rounds(make, sampling, sessions, calls):
    found = course(make(), sampling, sessions)
    grown = [shape for shape in calls if shape.tree is not None]
    assert len(grown) >= 3
    assert all(shape.sessions == sessions for shape in grown[1:])
    calls.clear()
    expected = course(make(None), sampling, sessions)
    assert not any(shape.tree for shape in calls)
    check_same(found, expected)


def test_one_program_replaces_a_program_a_round(make, calls):
    """From the features of a commit to the first proposal, which has all the levels."""
    proposals = []
    for growth in (GROWTH, None):
        engine = make(growth)
        session = FedSession(engine, 1, 9, GREEDY)
        session.feed(0)
        settle(engine)
        session.feed(session.commit([7, 8]))
        calls.clear()
        (proposal,) = engine.step().proposals
        assert [shape.tree for shape in calls] == [growth]
        proposals.append(proposal)
    levels = proposals[0].parents.tolist()
    assert max(levels) >= 0
    assert max(proposals[1].parents) < 0, "a single round knows the root's children alone"
    children = [token for token, above in zip(proposals[0].tokens, levels, strict=True) if above < 0]
    assert proposals[1].tokens.tolist() == children


def test_rows_of_grown_nodes_have_slots_of_their_own(make):
    engine = make()
    session = FedSession(engine, 1, 9, GREEDY)
    session.feed(0)
    engine.step()
    prefix_kv, expanded = engine.drafter.prefix_kvs[1], engine.running[1].frontiers[-1].expanded
    assert 0 < len(expanded) <= ROUNDS * WIDTH
    assert prefix_kv.free_slots == SCRATCH_SLOTS - len(expanded)
    assert len({prefix_kv.slot(node) for node in expanded}) == len(expanded)


def test_nothing_grows_behind_the_end_of_a_text(make):
    tokens = tuple(range(0, 480, 3))
    options = {"stop_token_ids": tokens}
    check_same(course(make(), GREEDY, **options), course(make(None), GREEDY, **options))


def test_levels_that_would_be_useless_are_not_grown(make, calls):
    """Too near to the end, with tokens that may not follow, with a small budget, or below n-grams' expansions."""
    for flags, options in (({}, {"max_tokens": ROUNDS}), ({}, {"min_tokens": 50, "stop_token_ids": (9,)})):
        engine = make(**flags)
        session = FedSession(engine, 1, 9, GREEDY, **options)
        session.feed(0)
        settle(engine)
        assert calls
        assert not any(shape.tree for shape in calls)


def test_levels_grow_beside_ngrams(make, calls):
    """Nodes of n-grams below the root are kept, and the head's are added."""
    trees = []
    for flags in ({"speculative_ngram_beside": True}, {}):
        engine = make(**flags)
        session = FedSession(engine, 1, 12, GREEDY)
        session.feed(0)
        settle(engine)
        session.feed(session.commit(session.tokens[3:5]))  # n-grams know what came next there
        settle(engine)
        trees.append(likely(engine, session))
    assert len([shape for shape in calls if shape.tree]) == 2, (
        "once in each engine; the first root comes with the prompt"
    )
    copied = tuple(session.tokens[5:7])
    assert copied in trees[0]
    assert copied not in trees[1]
    assert set(sorted(trees[1], key=trees[1].get)[-10:]) <= set(trees[0])


def test_other_work_does_not_starve(make):
    """Sessions whose roots are expanded in one program again and again leave rounds to one that grows by rounds."""
    engine = make()
    others = [FedSession(engine, i, 9 + 7 * i, GREEDY) for i in range(3)]
    slow = FedSession(engine, 3, 30, GREEDY, max_tokens=ROUNDS)
    for session in (*others, slow):
        session.feed(0)
    engine.drafter.runner.cost = lambda shape: 0.001 if shape.tree else 1.0
    for _ in range(20):
        engine.step()
        if slow.number in engine.running and engine.running[slow.number].root_expanded:
            return
        for session in others:
            session.feed(session.commit([5]))
    raise AssertionError("it was never drafted for")


def test_nothing_compiles_while_it_serves(make):
    engine = make()
    engine.drafter.warm_up()
    compiled = engine.drafter.runner.compilations.total
    course(engine, SAMPLED, sessions=3, commits=2)
    assert engine.drafter.runner.compilations.total == compiled
