"""Simulated acceptance: accept lengths of simulated drafts, and the shape of what a drafter hands on."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from bench.gpu.system.acceptance import SimulatedAcceptance, acceptance_of
from bench.gpu.system.continuation import Continuation
from outrider.serving.messages import OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT
from services.draft.drafters.base import Expansion
from services.draft.sessions.frontier import TreeLimits
from services.draft.sessions.session import DraftSession

TEXT = Continuation(300, 5000)
DEPTH = 8
DRAFTED = [7, 9, 11, 13]  # of a random head


def session_at(length, seed=0, shape=None):
    tokens = np.array([TEXT.after(400, i) for i in range(length)], np.uint32)
    request = OpenSession(1, tokens, length, SamplingParams(seed=seed), StopConditions(10**6))
    limits = TreeLimits(256, DEPTH, 8, floor=1e-30, shape=shape)
    return DraftSession(request, limits, ())


def accepted_of(session):
    """Draft tokens that the target would accept."""
    expected = [TEXT.after(int(session.tokens[-1]), i + 1) for i in range(DEPTH)]
    return len(session.tree.path_of(expected))


def grown_by_levels(simulated, length, seed):
    session = session_at(length, seed)
    node = ROOT
    for _ in range(DEPTH):
        scores = [math.log(0.25)] * 4
        expansion = simulated.replaced(Expansion(session, node, DRAFTED, [-1] * 4, scores))
        assert len(set(expansion.tokens)) == len(DRAFTED)
        session.grower.add(expansion.node, expansion.tokens, expansion.parents, expansion.log_scores)
        node = session.tree.children_of(node)[0]
    return session


def grown_at_once(simulated, length, seed):
    session = session_at(length, seed, TreeShape(DEPTH, 4, 24))
    drafted = [DRAFTED[i % 4] for i in range(23)]
    whole = Expansion(session, ROOT, drafted, [-1] * 23, [-9.0] * 23, whole=True)
    expansion = simulated.replaced(whole)
    session.grower.add_whole_tree(expansion.tokens, expansion.parents, expansion.log_scores)
    assert len(session.tree) == 23  # no two siblings are alike
    return session


def grown_for_further_rounds(simulated, length, seed):
    """An adaptive tree of which one program has grown all levels, two nodes a round; the head found short paths."""
    session = session_at(length, seed)
    parents = [-1] * 4 + [node for level in range(DEPTH - 1) for node in (4 * level, 4 * level + 1) for _ in range(2)]
    places = [-1] * len(parents)
    for place, node in enumerate(dict.fromkeys(parents[4:])):
        places[node] = place
    drafted = [DRAFTED[i % 4] for i in range(len(parents))]
    grown = Expansion(session, ROOT, drafted, parents, [-0.1] * len(parents), places=places)
    expansion = simulated.replaced(grown)
    session.grower.add_grown(expansion.tokens, expansion.parents, expansion.log_scores, expansion.places)
    assert len(session.tree) == len(parents)
    expanded = [place for place in expansion.places if place >= 0]
    assert len(expanded) == len(set(expanded)) == DEPTH - 1
    assert set(expanded) <= set(places)
    return session


@pytest.mark.parametrize("grown", [grown_by_levels, grown_at_once, grown_for_further_rounds])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_accept_lengths_are_those_asked_for(grown, index):
    lengths = (2.0, 3.0, 4.0)
    simulated = SimulatedAcceptance(TEXT, lengths, DEPTH)
    length = steps = 0
    while steps < 400:
        length += 1 + accepted_of(grown(simulated, 10 + length, seed=index + 3))
        steps += 1
    assert length / steps == pytest.approx(lengths[index], rel=0.1)


def test_claims_are_the_probabilities_also_below_a_wrong_token():
    simulated = SimulatedAcceptance(TEXT, [3.0], DEPTH)
    probability = acceptance_of(3.0, DEPTH)
    session = grown_by_levels(simulated, 10, 0)
    firsts = [0]
    while children := session.tree.children_of(firsts[-1]):
        firsts.append(children[0])
    assert len(firsts) == DEPTH
    assert [session.tree.log_score[node] for node in firsts] == pytest.approx([math.log(probability)] * DEPTH)


def test_a_drafter_computes_before_its_tokens_are_replaced():
    session, asked = session_at(10), []

    def compute(requests):
        asked.append(requests)
        return [Expansion(session, ROOT, (), (), ()), Expansion(session, ROOT, DRAFTED, [-1] * 4, [-1.0] * 4)]

    drafter = SimpleNamespace(expand=compute, executor=SimpleNamespace(min_edge=0.0))
    SimulatedAcceptance(TEXT, [DEPTH + 0.99], DEPTH).attach(drafter)
    empty, full = drafter.expand(["request"])
    assert asked == [["request"]]
    assert empty.tokens == ()
    assert list(full.tokens) == [TEXT.after(int(session.tokens[-1])), *DRAFTED[1:]]


def test_accept_lengths_that_no_tree_can_have_are_refused():
    with pytest.raises(ValueError, match="between 1 and the tree's 3"):
        acceptance_of(4.0, 3)
    assert acceptance_of(1.0, 3) == pytest.approx(0.0, abs=1e-9)


def test_wide_trees_over_a_short_text_have_siblings_that_differ():
    """A thousand tokens on lie only nine different ones, for a text of 180."""
    text = Continuation(300, 180)
    session = session_at(10)
    tokens = np.arange(400, 420).tolist()
    grown = Expansion(session, ROOT, tokens, [-1] * len(tokens), [-1.0] * len(tokens), places=[-1] * len(tokens))
    expansion = SimulatedAcceptance(text, [3.0], DEPTH).replaced(grown)
    assert len(set(expansion.tokens)) == len(tokens)
