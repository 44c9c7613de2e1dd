"""Claims of several drafters: they are calibrated by commits, and combined into the tree that accepts most."""

import math

import numpy as np
import pytest

from outrider.speculation.tree import ROOT, SpeculationTree
from services.draft.sessions.claims import ClaimModels, Claims

CERTAIN, LIKELY, HALF = (math.log(p) for p in (0.95, 0.8, 0.5))


class Pair:
    """Two drafters in one tree, which a test moves through a text. The budget counts nodes."""

    def __init__(self, models=None, budget=6):
        self.models = models or ClaimModels(2)
        self.budget = budget
        self.tree = SpeculationTree(np.zeros(1, np.uint32))
        self.claims = Claims(self.tree, self.models)

    def propose(self, drafter, tokens, log_scores, parents=None):
        """Children of the root, or by `parents` (indices among these tokens) a tree. Returns the nodes."""
        nodes = []
        for token, parent in zip(tokens, parents or [ROOT] * len(tokens), strict=True):
            nodes.append(self.tree.add(ROOT if parent == ROOT else nodes[parent], token, 0.0))
        self.claims.added([self.tree.parent[node] for node in nodes], nodes, log_scores, drafter)
        return nodes

    def verify(self, text):
        """The number of accepted draft tokens; the claims learn from the commit, and a new tree begins."""
        draft = self.tree.select(self.budget)
        chosen = SpeculationTree(np.zeros(1, np.uint32))
        chosen_nodes = []
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            chosen_nodes.append(chosen.add(ROOT if parent < 0 else chosen_nodes[parent], token, 0.0))
        accepted = len(chosen.path_of(text))
        committed = text[: accepted + 1]
        self.claims.learn(committed, self.tree.path_of(committed))
        self.tree.clear()
        self.claims.clear()
        return accepted


def probability(pair, node):
    return math.exp(pair.tree.log_score[node])


def test_claims_converge_to_acceptance_rates():
    """One drafter claims 0.8 and is right in 3 of 10 cases, the other claims as much rightly: both get what they do."""
    pair, rng = Pair(), np.random.default_rng(1)
    for _ in range(600):
        right = rng.random(2) < (0.3, 0.8)
        pair.propose(0, [10], [LIKELY])
        pair.propose(1, [20, 21], [HALF, math.log(0.3)], [ROOT, 0])  # always wrong at the root
        pair.verify([10, 11] if right[0] else [30, 31])
        pair.propose(1, [20], [LIKELY])
        pair.verify([20, 21] if right[1] else [30, 31])
    (first,) = pair.propose(0, [10], [LIKELY])
    alone = probability(pair, first)
    assert alone == pytest.approx(0.3, abs=0.12)
    pair.tree.clear()
    pair.claims.clear()
    (second,) = pair.propose(1, [20], [LIKELY])
    assert probability(pair, second) == pytest.approx(0.8, abs=0.12)


def test_agreement_is_likelier_than_either_claim_and_silence_less_likely():
    pair = Pair()
    (alone,) = pair.propose(0, [10], [HALF])
    before = probability(pair, alone)
    pair.propose(1, [10], [HALF + 0.2])
    assert probability(pair, alone) > before
    rng = np.random.default_rng(2)
    pair = Pair()
    for _ in range(400):  # what both propose is right in 9 of 10 cases, what one proposes against the other in 2
        agreed = rng.random() < 0.5
        pair.propose(0, [10], [HALF])
        pair.propose(1, [10 if agreed else 20], [HALF])
        pair.verify([10 if rng.random() < (0.9 if agreed else 0.2) else 30, 31])
    (node,) = pair.propose(0, [10], [HALF])
    pair.propose(1, [20], [HALF])
    assert probability(pair, node) < 0.35
    pair.tree.clear()
    pair.claims.clear()
    (node,) = pair.propose(0, [10], [HALF])
    pair.propose(1, [10], [HALF])
    assert probability(pair, node) > 0.75


def test_children_of_a_node_exclude_one_another():
    pair = Pair()
    nodes = pair.propose(0, [10, 11], [CERTAIN, CERTAIN]) + pair.propose(1, [12, 13], [CERTAIN, HALF])
    assert sum(probability(pair, node) for node in nodes) <= 1 + 1e-6


def test_an_own_text_outweighs_what_other_sessions_taught():
    models = ClaimModels(2)
    for _ in range(200):  # in other texts the first drafter is never right
        pair = Pair(models)
        pair.propose(0, [10], [LIKELY])
        pair.verify([30, 31])
    pair = Pair(models)
    chances = []
    for _ in range(30):
        (node,) = pair.propose(0, [10], [LIKELY])
        chances.append(probability(pair, node))
        pair.verify([10, 11])
    assert chances[0] < 0.2
    assert chances[-1] > 0.6
    other = Pair(models)
    (node,) = other.propose(0, [10], [LIKELY])
    assert probability(other, node) < 0.5  # of a session that has taught nothing


def world(seed, useful, steps=70, sessions=6):
    """Positions of texts with two drafters: a head whose claims are right, and one that claims long certain chains.

    useful: how often such a chain is right in a session, one number for each session in turn
    """
    rng = np.random.default_rng(seed)
    for session in range(sessions):
        text = rng.integers(0, 1000, steps + 8).tolist()
        places = []
        for place in range(steps):
            tokens, parents, scores, above = [], [], [], ROOT
            for level in range(4):
                siblings = rng.integers(1000, 2000, 3).tolist()
                chance = rng.random()
                if chance < 0.8:
                    siblings[0 if chance < 0.6 else 1 if chance < 0.75 else 2] = text[place + level]
                tokens, parents = tokens + siblings, parents + [above] * 3
                scores += [math.log(0.6), math.log(0.15), math.log(0.05)]
                above = len(tokens) - 3
            right = rng.random() < useful[session % len(useful)]
            chain = text[place : place + 6] if right else rng.integers(1000, 2000, 6).tolist()
            places.append(((tokens, scores, parents), (chain, [LIKELY] * 6, [ROOT, 0, 1, 2, 3, 4])))
        yield text, places


def accept_length(places_of, drafters, budget=10):
    """Tokens of a step with some of the drafters, of which the highest claims decide if `drafters` is None."""
    models, tokens, steps = ClaimModels(2), 0, 0
    for text, places in places_of:
        pair, place = Pair(models, budget), 0
        while place < len(places):
            for drafter in drafters:
                pair.propose(drafter, *places[place][drafter])
            count = pair.verify(text[place:]) + 1
            tokens, steps, place = tokens + count, steps + 1, place + count
    return tokens / steps


@pytest.mark.parametrize(
    ("useful", "least"),
    [((0.0,), 0.98), ((0.9,), 0.98), ((0.4,), 1.05), ((0.0, 0.9), 1.1)],
    ids=["useless", "best", "helpful", "by text"],
)
def test_both_drafters_are_at_least_as_good_as_the_better_one(useful, least):
    """A useless second drafter costs less than 2 % of the accept length; one that is right at times lengthens it."""
    places = list(world(3, useful))
    alone = [accept_length(places, [drafter]) for drafter in (0, 1)]
    assert accept_length(places, [0, 1]) >= least * max(alone)
