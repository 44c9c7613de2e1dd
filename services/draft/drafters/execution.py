"""Runs the steps of a model drafter: moves rows of accepted nodes, builds inputs, and reads expansions from results."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.tree import ROOT
from services.draft.drafters.base import Expansion
from services.draft.model.programs.runner import ModelRunner
from services.draft.sessions.batch import SessionWork, StepShape, build_inputs
from services.draft.sessions.session import DraftSession

_MIN_EDGE = math.log(2e-3)


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
        if shape.tree is not None:
            tokens, parents, scores = (part.tolist() for part in self.runner.run_tree(shape, inputs))
            found = zip(works, tokens, parents, scores, strict=False)
            return [
                Expansion(work.session, ROOT, own_tokens, own_parents, own_scores, whole=True)
                for work, own_tokens, own_parents, own_scores in found
                if self._reaches_root(work)
            ]
        ids, log_scores = self.runner.run(shape, inputs)
        expansions: list[Expansion] = []
        for row, work in enumerate(works):
            expansions += self._expansions(work, ids[row], log_scores[row])
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

    def _expansions(
        self, work: SessionWork, ids: NDArray[np.int32], log_scores: NDArray[np.float32]
    ) -> list[Expansion]:
        if work.feed and not self._reaches_root(work):
            return []
        nodes = (ROOT,) if work.feed else work.nodes
        found = zip(nodes, ids.tolist(), log_scores.tolist(), strict=False)
        return [self._expansion(work.session, node, tokens, scores) for node, tokens, scores in found]

    def _expansion(self, session: DraftSession, node: int, tokens: list[int], scores: list[float]) -> Expansion:
        """tokens, scores: candidates, best first."""
        count = sum(score > self.min_edge for score in scores)
        return Expansion(session, node, tokens[:count], [-1] * count, scores[:count])
