"""The trees of a simulated head: their shape, what it claims of each node, and the accept length that follows.

A head's candidates below any node are right with fixed probabilities, whatever the text: the first one with most of the
probability that one of them is. So all trees of a kind have one shape, the likeliest nodes first, and their accept
length is one more than the sum of their nodes' probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

_DECAY = 0.25  # of a candidate's probability, to that of the one before it
_NODES = 15  # of the adaptive tree that defines an accept length: with the root, 16 verified tokens
_HALVINGS = 60


class Nodes(NamedTuple):
    """A tree, parents before children. parents: -1 for the root. ranks: among the siblings, the likeliest first.

    scores: natural logs of the nodes' path probabilities. expanded: nodes with children, in the order of their rounds
    """

    parents: list[int]
    ranks: list[int]
    scores: list[float]
    expanded: list[int]

    def best(self, count: int) -> Nodes:
        """The likeliest nodes, in the same order."""
        kept = sorted(sorted(range(len(self.parents)), key=lambda node: -self.scores[node])[:count])
        place = {node: i for i, node in enumerate(kept)}
        return Nodes(
            [place.get(self.parents[node], -1) for node in kept],
            [self.ranks[node] for node in kept],
            [self.scores[node] for node in kept],
            [place[node] for node in self.expanded if node in place],
        )

    @property
    def accept_length(self) -> float:
        """The mean number of tokens that a step commits with this tree."""
        return 1 + sum(map(math.exp, self.scores))


def claims_of(probability: float, children: int) -> list[float]:
    """Natural logs of the probabilities of a node's candidates. probability: that one of them is right."""
    shares = [_DECAY**rank for rank in range(children)]
    return [math.log(max(probability * share / sum(shares), 1e-9)) for share in shares]


def grown(claims: Sequence[float], rounds: int, width: int, *, by_level: bool = False) -> Nodes:
    """The tree of a root's expansion and of further rounds, each of which expands the likeliest nodes that are left.

    claims: of the candidates of each node. width: nodes that a round expands. by_level: those of the last round's
    """
    tree = Nodes([], [], [], [])

    def expand(node: int, score: float) -> None:
        tree.parents.extend([node] * len(claims))
        tree.ranks.extend(range(len(claims)))
        tree.scores.extend(score + claim for claim in claims)

    expand(-1, 0.0)
    left = list(range(len(claims)))
    for _ in range(rounds):
        left.sort(key=lambda node: -tree.scores[node])
        chosen, first = left[:width], len(tree.parents)
        for node in chosen:
            expand(node, tree.scores[node])
        tree.expanded.extend(chosen)
        left = [*([] if by_level else left[width:]), *range(first, len(tree.parents))]
    return tree


def of_shape(claims: Sequence[float], steps: int, nodes: int) -> Nodes:
    """An explicit tree: levels of as many nodes as a node has candidates, and the likeliest of all."""
    return grown(claims, steps - 1, len(claims), by_level=True).best(nodes)


def adaptive(claims: Sequence[float]) -> Nodes:
    """The adaptive tree that defines an accept length."""
    return grown(claims, _NODES, 1).best(_NODES)


def probability_of(accept_length: float, children: int, tree: Callable[[Sequence[float]], Nodes]) -> float:
    """The probability that one of a node's candidates is right which gives an accept length. tree: of their claims.

    Raises ValueError for one that such trees cannot have.
    """
    longest = tree(claims_of(1.0, children)).accept_length
    if not 1 <= accept_length < longest:
        raise ValueError(f"an accept length of {accept_length:g} does not lie between 1 and the trees' {longest:.1f}")
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        shorter = tree(claims_of(middle, children)).accept_length < accept_length
        low, high = (middle, high) if shorter else (low, middle)
    return low
