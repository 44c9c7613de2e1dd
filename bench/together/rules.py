"""Rules that choose which of several drafters' nodes a step verifies, replayed on recorded trees.

A replay commits as a target would: a step verifies the nodes that the rule chooses, and the next one begins behind the
tokens that it accepted and the bonus token. Trees of every position are known: no rule changes what drafters propose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.together.trees import Nodes, Trees
from outrider.speculation.tree import ROOT, SpeculationTree
from services.draft.sessions.claims import ClaimModels, Claims

_CAPACITY = 512


class Text(NamedTuple):
    """An answer to replay. tokens: behind the first one."""

    category: str
    temperature: float
    tokens: list[int]


class Step(NamedTuple):
    """Tokens that a step committed in a text, by its number."""

    text: int
    tokens: int


class Rule(ABC):
    """Merges the trees of one position. Both drafters' nodes are in one tree, whose scores the rule sets."""

    def open(self, text: Text) -> None:  # noqa: B027  (most rules learn nothing)
        """A text begins."""

    @abstractmethod
    def chosen(self, trees: Sequence[Nodes], budget: int) -> SpeculationTree:
        """A tree of the nodes to verify, at most `budget`."""

    def learn(self, tokens: Sequence[int]) -> None:  # noqa: B027
        """The step has committed these tokens."""


class Alone(Rule):
    """The nodes of one drafter."""

    def __init__(self, drafter: int) -> None:
        self._drafter = drafter

    def chosen(self, trees: Sequence[Nodes], budget: int) -> SpeculationTree:
        """As of Rule."""
        return _best(_united([trees[self._drafter]]), budget)


class Split(Rule):
    """Each drafter's best nodes in turn, until the budget is spent."""

    def chosen(self, trees: Sequence[Nodes], budget: int) -> SpeculationTree:
        """As of Rule."""
        chosen, orders = _empty(), []
        for nodes in trees:
            own = _united([nodes])
            orders.append([own.path_tokens(node) for node in _order(own, budget)])
        for rank in range(budget):
            for order in orders:
                if rank < len(order) and len(chosen) < budget:
                    _add_path(chosen, order[rank])
        return chosen


class Highest(Rule):
    """The highest claim of any drafter is a node's score. limits: deepest level and children a node, if limited."""

    def __init__(self, depth: int | None = None, children: int | None = None) -> None:
        self._depth, self._children = depth, children

    def chosen(self, trees: Sequence[Nodes], budget: int) -> SpeculationTree:
        """As of Rule; the limits apply to what was chosen without them, as a target with these flags applied them."""
        united = _united(trees)
        if self._depth is not None:
            united.retain(sorted(_order(united, budget)))
        return _best(united, budget, self._depth, self._children)


class Combined(Rule):
    """The rule of the draft service: claims are calibrated and combined by what commits teach."""

    def __init__(self, drafters: int, depth: int | None = None, children: int | None = None) -> None:
        """depth, children: deepest level and children a node, if they are limited."""
        self._drafters, self._limits = drafters, (depth, children)
        self._models: dict[bool, ClaimModels] = {}

    def open(self, text: Text) -> None:
        """As of Rule."""
        sampled = text.temperature > 0.0
        models = self._models.setdefault(sampled, ClaimModels(self._drafters))
        self._tree = _empty()
        self._claims = Claims(self._tree, models)

    def chosen(self, trees: Sequence[Nodes], budget: int) -> SpeculationTree:
        """As of Rule."""
        self._tree.clear()
        self._claims.clear()
        for drafter, nodes in enumerate(trees):
            places = _insert(self._tree, nodes)
            above = [places[parent] if parent >= 0 else ROOT for parent in nodes.parents]
            self._claims.added(above, places, nodes.log_scores, drafter)
        return _best(self._tree, budget, *self._limits)

    def learn(self, tokens: Sequence[int]) -> None:
        """As of Rule."""
        self._claims.learn(tokens, self._tree.path_of(tokens))


class Oracle(Rule):
    """All nodes of all drafters, as if the best of them were known."""

    def chosen(self, trees: Sequence[Nodes], budget: int) -> SpeculationTree:
        """As of Rule; the budget does not bind it."""
        del budget
        return _united(trees)


def replay(rule: Rule, texts: Sequence[Text], trees: Sequence[Sequence[Trees]], budget: int) -> list[Step]:
    """The steps of all texts. trees: by drafter and text; budget: draft tokens of a step."""
    steps: list[Step] = []
    for number, text in enumerate(texts):
        rule.open(text)
        place = 0
        while place < len(text.tokens):
            found = rule.chosen([own[number][place] for own in trees], budget)
            rest = text.tokens[place:]
            count = min(len(found.path_of(rest)) + 1, len(rest))
            rule.learn(rest[:count])
            steps.append(Step(number, count))
            place += count
    return steps


# --- trees ---


def _empty() -> SpeculationTree:
    return SpeculationTree(np.zeros(1, np.uint32), _CAPACITY)


def _insert(tree: SpeculationTree, nodes: Nodes) -> list[int]:
    places: list[int] = []
    for token, parent, score in zip(nodes.tokens, nodes.parents, nodes.log_scores, strict=True):
        node = tree.add(places[parent] if parent >= 0 else ROOT, token, min(score, 0.0))
        assert node is not None, "the trees of two drafters fit the capacity"
        places.append(node)
    return places


def _united(trees: Sequence[Nodes]) -> SpeculationTree:
    tree = _empty()
    for nodes in trees:
        _insert(tree, nodes)
    return tree


def _order(tree: SpeculationTree, budget: int) -> list[int]:
    return tree.find(tree.select(budget))


def _best(tree: SpeculationTree, budget: int, depth: int | None = None, children: int | None = None) -> SpeculationTree:
    """A tree of the best nodes."""
    best, places = _empty(), list[int]()
    draft = tree.select(budget, depth, children)
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        node = best.add(places[parent] if parent >= 0 else ROOT, token, 0.0)
        assert node is not None
        places.append(node)
    return best


def _add_path(tree: SpeculationTree, tokens: Sequence[int]) -> None:
    node: int | None = ROOT
    for token in tokens:
        assert node is not None
        node = tree.add(node, token, 0.0)
