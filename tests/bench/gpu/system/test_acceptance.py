"""Simulated acceptance: accept lengths of simulated drafts, and the shape of what a drafter hands on."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from bench.gpu.system.acceptance import SimulatedAcceptance
from bench.gpu.system.continuation import Continuation
from bench.gpu.system.simulated_trees import adaptive, claims_of, grown, of_shape, probability_of
from outrider.serving.messages import OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT
from services.draft.drafters.base import Expansion
from services.draft.sessions.batch import Growth
from services.draft.sessions.frontier import TreeLimits
from services.draft.sessions.session import DraftSession

TEXT = Continuation(300, 5000)
LENGTHS = (2.0, 3.0, 4.0)
DEPTH, CHILDREN = 16, 4
GROWTH = Growth(rounds=4, width=4)
SHAPE, CHAIN = TreeShape(7, 4, 16), TreeShape(7, 1, 8)
DRAFTED = [7, 9, 11, 13]  # of a random head


def session_at(length, seed=0, shape=None):
    tokens = (300 + (100 + np.arange(length)) % TEXT.size).astype(np.uint32)
    request = OpenSession(1, tokens, length, SamplingParams(seed=seed), StopConditions(10**6))
    limits = TreeLimits(256, DEPTH, CHILDREN, floor=1e-30, shape=shape)
    session = DraftSession(request, limits, ())
    session.frontiers[-1].held = True
    return session


def accepted_of(session, best=None):
    """Draft tokens that the target would accept of a tree, or of its likeliest nodes."""
    expected = [TEXT.after(int(session.tokens[-1]), i + 1) for i in range(DEPTH)]
    path = session.tree.path_of(expected)
    return len(path if best is None else set(path) & set(session.tree.best_nodes(best)))


def by_node(simulated, length, seed):
    """Of an adaptive tree that grows node by node, and whose 15 best nodes are verified."""
    session, node = session_at(length, seed), ROOT
    for _ in range(16):
        scores = [math.log(0.25)] * 4
        expansion = simulated.replaced(Expansion(session, node, DRAFTED, [-1] * 4, scores))
        assert len(set(expansion.tokens)) == len(DRAFTED)
        session.grower.add(expansion.node, expansion.tokens, expansion.parents, expansion.log_scores)
        node = session.best_leaves(1)[0][1]
    return accepted_of(session, 15)


def at_once(simulated, length, seed):
    """Of an explicit tree."""
    shape = simulated._shape
    session, count = session_at(length, seed, shape), shape.rows - 1
    drafted = [DRAFTED[i % 4] for i in range(count)]
    whole = Expansion(session, ROOT, drafted, [-1] * count, [-9.0] * count, whole=True)
    expansion = simulated.replaced(whole)
    session.grower.add_whole_tree(expansion.tokens, expansion.parents, expansion.log_scores)
    assert len(session.tree) == count  # no two siblings are alike
    return accepted_of(session)


@pytest.mark.parametrize(
    ("accepted", "children", "shape"), [(by_node, 4, None), (at_once, 4, SHAPE), (at_once, 1, CHAIN)]
)
def test_accept_lengths_are_those_asked_for(accepted, children, shape):
    simulated = SimulatedAcceptance(TEXT, LENGTHS, children, shape)
    for index, expected in enumerate(LENGTHS):
        length = steps = 0
        while steps < 300:
            length += 1 + accepted(simulated, 10 + length, index + 3)
            steps += 1
        assert length / steps == pytest.approx(expected, rel=0.1)


def test_one_program_grows_the_tree_that_a_calibrated_head_would():
    """The random head has found other paths; the drafter keeps rows of the new tree's expanded nodes."""
    simulated = SimulatedAcceptance(TEXT, LENGTHS, CHILDREN, growths=[GROWTH])
    session = session_at(10)
    parents = [-1] * 4 + [node for node in range(16) for _ in range(4)]
    places = [*range(16), *[-1] * 52]
    drafted = [DRAFTED[i % 4] for i in range(68)]
    expansion = simulated.replaced(Expansion(session, ROOT, drafted, parents, [-0.1] * 68, places=places))
    added = session.grower.add_grown(expansion.tokens, expansion.parents, expansion.log_scores, expansion.places)
    assert None not in added
    assert len(session.tree) == 68
    assert sorted(place for place in expansion.places if place >= 0) == [*range(16)]
    above = {node: [i for i, parent in enumerate(expansion.parents) if parent == node] for node in range(68)}
    assert all(bool(above[node]) == (place >= 0) for node, place in enumerate(expansion.places))
    depth = max(session.tree.depth)
    assert depth == GROWTH.steps
    expected = grown(claims_of(probability_of(2.0, CHILDREN, adaptive), CHILDREN), 4, 4)
    assert 1 + sum(map(math.exp, session.tree.path_score)) == pytest.approx(expected.accept_length)


def test_claims_are_the_probabilities_also_below_a_wrong_token():
    session = session_at(10)
    simulated = SimulatedAcceptance(TEXT, LENGTHS, CHILDREN)
    claims = claims_of(probability_of(2.0, CHILDREN, adaptive), CHILDREN)
    node = ROOT
    for _ in range(5):
        expansion = simulated.replaced(Expansion(session, node, DRAFTED, [-1] * 4, [-1.0] * 4))
        assert expansion.log_scores == claims
        session.grower.add(expansion.node, expansion.tokens, expansion.parents, expansion.log_scores)
        node = session.tree.children_of(node)[-1]  # the least likely one


def test_wide_trees_over_a_short_text_have_siblings_that_differ():
    """A thousand tokens on lie only nine different ones, for a text of 180."""
    tokens, session = np.arange(400, 420).tolist(), session_at(10)
    expansion = Expansion(session, ROOT, tokens, [-1] * 20, [-1.0] * 20)
    assert len(set(SimulatedAcceptance(Continuation(300, 180), [3.0], 20).replaced(expansion).tokens)) == 20


def test_a_drafter_computes_before_its_tokens_are_replaced():
    session, asked = session_at(10), []

    def compute(requests):
        asked.append(requests)
        return [Expansion(session, ROOT, (), (), ()), Expansion(session, ROOT, DRAFTED, [-1] * 4, [-1.0] * 4)]

    drafter = SimpleNamespace(expand=compute, executor=SimpleNamespace(min_edge=0.0))
    SimulatedAcceptance(TEXT, [1.0], CHILDREN).attach(drafter)
    empty, full = drafter.expand(["request"])
    assert asked == [["request"]]
    assert empty.tokens == ()
    assert list(full.tokens) == DRAFTED  # none is right


def test_accept_lengths_that_no_tree_can_have_are_refused():
    with pytest.raises(ValueError, match=r"between 1 and the trees' 4\.0"):
        probability_of(4.0, 1, lambda claims: of_shape(claims, 3, 3))
    assert probability_of(1.0, 1, lambda claims: of_shape(claims, 3, 3)) == pytest.approx(0.0, abs=1e-9)
