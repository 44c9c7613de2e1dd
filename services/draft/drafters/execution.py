"""Runs the steps of a model drafter: moves rows of accepted nodes, builds inputs, and reads expansions from results."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.tree import ROOT
from services.draft.drafters.base import Expansion
from services.draft.drafters.block_tree import BlockLimits, best_paths, candidates_of
from services.draft.model.layers.heads import BlockHead
from services.draft.model.programs.runner import ModelRunner
from services.draft.sessions.batch import Block, SessionWork, StepShape, build_inputs

_MIN_EDGE = math.log(2e-3)
_MAX_BLOCK_NODES = 64  # of a block's adaptive tree


class StepExecutor:
    """Runs steps of a model.

    moves: by session, rows to move from the scratch into the prefix KV before the next step
    step_tokens: tokens of the last step
    min_edge: log-probability of an edge; less likely candidates are not worth a node
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.moves: dict[int, list[tuple[int, int]]] = {}
        self.step_tokens = 0
        self.min_edge = _MIN_EDGE

    def run(self, shape: StepShape, works: list[SessionWork]) -> list[Expansion]:
        """Run one step. Returns the expansions that it computed."""
        moves = self._due_moves(works)
        if len(moves) > shape.moves:
            self.runner.move(moves)
            moves = []
        inputs = build_inputs(self.runner.step_buffer(shape), works, moves)
        self.step_tokens = sum(work.feed or len(work.nodes) for work in works)
        if isinstance(shape.tree, Block):
            return self._blocks(works, *self.runner.run(shape, inputs))
        if shape.tree is not None:
            tokens, parents, edges, *places = self.runner.run_tree(shape, inputs)
            likely = np.where(edges > self.min_edge, edges, -math.inf)
            tokens, parents, scores, *places = (part.tolist() for part in (tokens, parents, likely, *places))
            found = zip(works, zip(tokens, parents, scores, strict=True), strict=False)
            return [
                Expansion(work.session, ROOT, *nodes, whole=not places, places=places[0][row] if places else ())
                for row, (work, nodes) in enumerate(found)
                if self._reaches_root(work)
            ]
        ids, log_scores = (part.tolist() for part in self.runner.run(shape, inputs))
        expansions: list[Expansion] = []
        for work, tokens, scores in zip(works, ids, log_scores, strict=False):
            expansions += self._expansions(work, tokens, scores)
        return expansions

    def _blocks(
        self, works: list[SessionWork], ids: NDArray[np.int32], log_scores: NDArray[np.float32]
    ) -> list[Expansion]:
        """The trees of blocks. ids, log_scores: results of the program."""
        head, expansions = self.runner.config.head, list[Expansion]()
        selector = head.selector if isinstance(head, BlockHead) else 0
        for work, found in zip(works, candidates_of(ids, log_scores, selector), strict=False):
            if self._reaches_root(work):
                session, grower = work.session, work.session.grower
                shape = grower.limits.shape
                nodes = shape.rows - 1 if shape is not None else min(max(session.draft_budget, 1), _MAX_BLOCK_NODES)
                limits = BlockLimits(nodes, grower.max_depth, self.min_edge, grower.limits.log_floor, grower.stop_ids)
                expansions.append(Expansion(session, ROOT, *best_paths(found, limits)))
        return expansions

    def _due_moves(self, works: list[SessionWork]) -> list[tuple[int, int]]:
        """All moves, except those into rows that this step computes again."""
        for work in works:
            if work.feed and work.session.id in self.moves:
                start = work.prefix_kv.settled
                computed = set(work.prefix_kv.table.slots(start, start + work.feed).tolist())
                moves = self.moves[work.session.id]
                self.moves[work.session.id] = [move for move in moves if move[1] not in computed]
        due = [move for moves in self.moves.values() for move in moves]
        self.moves = {}
        return due

    def _reaches_root(self, work: SessionWork) -> bool:
        """Count the fed rows as computed. Returns True if no row before the root is missing."""
        prefix_kv = work.prefix_kv
        prefix_kv.feed(work.feed)
        prefix_kv.publish(work.session.tokens)
        return prefix_kv.settled == work.session.length - prefix_kv.shift

    def _expansions(self, work: SessionWork, tokens: list[list[int]], log_scores: list[list[float]]) -> list[Expansion]:
        """tokens, log_scores: candidates of each row, best first."""
        if work.feed and not self._reaches_root(work):
            return []
        session, least = work.session, self.min_edge
        expansions: list[Expansion] = []
        for node, children, scores in zip((ROOT,) if work.feed else work.nodes, tokens, log_scores, strict=False):
            count = len(scores)
            while count and scores[count - 1] <= least:
                count -= 1
            expansions.append(Expansion(session, node, children[:count], [-1] * count, scores[:count]))
        return expansions
