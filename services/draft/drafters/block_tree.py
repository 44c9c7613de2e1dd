"""The draft tree of a block: the likeliest paths through the candidates of its positions.

A block drafter predicts every position by itself, so a path's probability is the product of those of its tokens, and
every candidate of a position may stand below every node of the position before. The tree is the paths with the highest
products, found best first: behind a node come its next sibling, which is less likely, and its own first child.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Sequence
from typing import NamedTuple


class BlockLimits(NamedTuple):
    """Limits of a block's tree. nodes: at most; depth: deepest level; edge: least log-score of an edge, exclusive;
    path: least log-score of a path; ends: tokens behind which the text ends
    """

    nodes: int
    depth: int
    edge: float = -math.inf
    path: float = -math.inf
    ends: Container[int] = ()


def best_paths(
    tokens: Sequence[Sequence[int]], log_scores: Sequence[Sequence[float]], limits: BlockLimits
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and log-scores of the nodes, likeliest first. tokens, log_scores: by position, best first.

    parents: index among the nodes, or -1 for the root
    """
    depth = min(limits.depth, len(tokens))
    found: tuple[list[int], list[int], list[float]] = ([], [], [])
    ahead: list[tuple[float, int, int, int]] = []  # negated score of the path, position, place, parent

    def offer(above: float, position: int, place: int, parent: int) -> None:
        """above: negated score of the path to the parent."""
        edges = log_scores[position]
        if place < len(edges) and edges[place] > limits.edge and above - edges[place] <= -limits.path:
            heapq.heappush(ahead, (above - edges[place], position, place, parent))

    if depth > 0:
        offer(0.0, 0, 0, -1)
    while ahead and len(found[0]) < limits.nodes:
        cost, position, place, parent = heapq.heappop(ahead)
        token, edge = tokens[position][place], log_scores[position][place]
        offer(cost + edge, position, place + 1, parent)
        if position + 1 < depth and token not in limits.ends:
            offer(cost, position + 1, 0, len(found[0]))
        for part, value in zip(found, (token, parent, edge), strict=True):
            part.append(value)
    return found
