"""The draft tree of a block: the likeliest paths through the candidates of its positions.

A block drafter predicts every position by itself, so a path's probability is the product of those of its tokens, and
every candidate of a position may stand below every node of the position before; where a selector corrects candidates by
the token before them, each node has children of its own. The tree is the paths with the highest products, found best
first: behind a node come its next sibling, which is less likely, and its own first child.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class BlockLimits(NamedTuple):
    """Limits of a block's tree. nodes: at most; depth: deepest level; edge: least log-score of an edge, exclusive;
    path: least log-score of a path; ends: tokens behind which the text ends
    """

    nodes: int
    depth: int
    edge: float = -math.inf
    path: float = -math.inf
    ends: Container[int] = ()


class Candidates(NamedTuple):
    """Candidates by position. tokens: of each place; children: by place before, the places of the children, best first;
    log_scores: theirs. Where these do not depend on the place before, they stand there once.
    """

    tokens: Sequence[Sequence[int]]
    children: Sequence[Sequence[Sequence[int]]]
    log_scores: Sequence[Sequence[Sequence[float]]]


def candidates_of(ids: NDArray[np.int32], log_scores: NDArray[np.float32], selector: int) -> Iterator[Candidates]:
    """The candidates of each session. ids, log_scores: results of a program with blocks, [S, positions, K], or with a
    selector as `programs.block.selected` returns them; selector: as of BlockHead.
    """
    if selector:
        shape = (*ids.shape[:2], selector, -1)
        children = ids[:, :, selector:].reshape(shape).tolist()
        scores = log_scores[:, :, selector:].reshape(shape).tolist()
        yield from map(Candidates, ids[:, :, :selector].tolist(), children, scores)
        return
    every = [[range(ids.shape[2])]] * ids.shape[1]
    for tokens, edges in zip(ids.tolist(), log_scores[:, :, None].tolist(), strict=True):
        yield Candidates(tokens, every, edges)


def best_paths(candidates: Candidates, limits: BlockLimits) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and log-scores of the nodes, likeliest first.

    parents: index among the nodes, or -1 for the root
    """
    tokens, children, log_scores = candidates
    depth = min(limits.depth, len(tokens))
    ids, parents, scores = list[int](), list[int](), list[float]()
    ahead: list[tuple[float, int, int, int, int]] = []  # path's negated score, position, rank, place before, parent

    def offer(above: float, position: int, rank: int, before: int, parent: int) -> None:
        """above: negated score of the path to the parent."""
        edges = log_scores[position][before if len(log_scores[position]) > 1 else 0]
        if rank < len(edges) and edges[rank] > limits.edge and above - edges[rank] <= -limits.path:
            heapq.heappush(ahead, (above - edges[rank], position, rank, before, parent))

    if depth > 0:
        offer(0.0, 0, 0, 0, -1)
    while ahead and len(ids) < limits.nodes:
        cost, position, rank, before, parent = heapq.heappop(ahead)
        row = before if len(log_scores[position]) > 1 else 0
        place, edge = children[position][row][rank], log_scores[position][row][rank]
        token = tokens[position][place]
        offer(cost + edge, position, rank + 1, before, parent)
        if position + 1 < depth and token not in limits.ends:
            offer(cost, position + 1, 0, place, len(ids))
        ids.append(token)
        parents.append(parent)
        scores.append(edge)
    return ids, parents, scores
