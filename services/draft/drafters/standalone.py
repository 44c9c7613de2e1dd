"""STANDALONE: a small model with the target's vocabulary drafts by itself.

    trunk   committed tokens that the cache lacks are fed; the last of them gives the root's children
    nodes   the most promising leaves are expanded, all of a round in one call of the model

A round is one compiled program of one of a few shapes. Which one is a matter of measured cost: the shape that gains the
most reach probability per second wins. Long prompts are fed in chunks that take turns with rounds of growth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.paging.prefix import PrefixCache
from outrider.serving.messages import EngineLoad
from outrider.speculation.tree import ROOT
from services.draft.batch import Job, Shape, build_inputs
from services.draft.drafters.base import Drafter, Growth, Wish
from services.draft.model.runner import ModelRunner
from services.draft.session import DraftSession
from services.draft.trunk import Trunk

# Candidates below this edge probability are not worth a node.
_LEAST_EDGE = math.log(2e-3)
# What a round of waiting adds to the gain of feeding a root, so that the narrow shapes cannot starve it.
_PATIENCE_GAIN = 0.25


@dataclass
class _Work:
    """What one session would like a round to do: feed `pending` tokens, or expand nodes, best first."""

    session: DraftSession
    trunk: Trunk
    pending: int = 0
    nodes: list[int] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)

    def gain(self, rows: int) -> float:
        """Reach probability that a number of rows would expand."""
        if self.pending:
            return 1.0 + _PATIENCE_GAIN * self.session.rounds_waited if self.pending <= rows else 0.0
        return sum(self.reach[:rows])

    def job(self, rows: int) -> Job:
        """The part that fits into a number of rows."""
        return Job(self.session, self.trunk, feed=min(self.pending, rows), nodes=tuple(self.nodes[:rows]))


def growth_shapes(max_running: int) -> list[Shape]:
    """Shapes of rounds of growth, small to large."""
    sizes = [1, 4, 16, 64]
    count = next((i for i, size in enumerate(sizes) if size >= max_running), len(sizes) - 1)
    rows = {1: (1, 4, 8), 4: (1, 4), 16: (1, 4), 64: (2,)}
    return [Shape(size, q, q) for size in sizes[: count + 1] for q in rows[size]]


class StandaloneDrafter(Drafter):
    """Drafts with a model of its own."""

    name = "STANDALONE"

    def __init__(self, runner: ModelRunner, prefix: PrefixCache, max_running: int, chunk: int) -> None:
        """chunk: tokens of a prompt that are fed at a time."""
        self.runner = runner
        self.prefix = prefix
        self.eos_token_ids = runner.config.eos_token_ids
        self.max_session_tokens = min(runner.config.context, runner.table_pages * runner.page_size)
        self._growth_shapes = growth_shapes(max_running)
        self._chunk_shape = Shape(1, chunk, 1)
        self._most_rows = max(shape.rows for shape in self._growth_shapes if shape.sessions == 1)
        self._trunks: dict[int, Trunk] = {}
        self._moves: dict[int, list[tuple[int, int]]] = {}  # by session: rows to move before the next step
        self._fed_chunk = False  # the last round was a chunk
        self._step_tokens = 0

    def warm_up(self) -> None:
        """Compile and measure every shape."""
        self.runner.warm_up([*self._growth_shapes, self._chunk_shape])

    # --- sessions ---

    def open(self, session: DraftSession) -> None:
        """Lease trunk and scratch. Raises OutOfPages."""
        self._trunks[session.id] = Trunk(self.prefix, session.tokens, session.cache_salt)

    def close(self, session: DraftSession) -> None:
        """Give the pages back."""
        pending = len(self._moves.pop(session.id, ()))
        trunk = self._trunks.pop(session.id)
        trunk.publish(session.tokens, pending)
        trunk.release()

    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """Take the rows of accepted nodes over into the trunk."""
        trunk = self._trunks[session.id]
        if moves := trunk.accept(session.length, count, path):
            self._moves.setdefault(session.id, []).extend(moves)
        return trunk.computed == session.length + count

    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """Free the slots of nodes that are gone."""
        self._trunks[session.id].renumber(kept)

    def load(self) -> EngineLoad:
        """Pages, and rows of the last round."""
        allocator = self.prefix.allocator
        return EngineLoad(
            free_pages=allocator.free_pages,
            total_pages=allocator.total_pages,
            step_tokens=self._step_tokens,
            cached_pages=allocator.cached_pages,
        )

    def check(self) -> None:
        """Audit the pages against what the sessions hold."""
        tables = [table for trunk in self._trunks.values() for table in trunk.tables]
        self.prefix.allocator.check(tables=[table.pages.tolist() for table in tables])
        self.prefix.check()

    # --- rounds ---

    def grow(self, wishes: Sequence[Wish]) -> list[Growth]:
        """Feed a chunk of a prompt, or grow the trees where it pays most."""
        works = self._works(wishes)
        prompts = [work for work in works if work.pending > self._most_rows]
        leaves = [work for work in works if work.pending <= self._most_rows]
        self._fed_chunk = bool(prompts) and not (leaves and self._fed_chunk)
        if self._fed_chunk:
            # The shortest first, but none waits for ever.
            chunk = self._chunk_shape.rows
            work = min(prompts, key=lambda work: work.pending - chunk * work.session.rounds_waited)
            return self._run(self._chunk_shape, [work.job(chunk)])
        shape, chosen = self._best_shape(leaves)
        return self._run(shape, [work.job(shape.rows) for work in chosen])

    def _works(self, wishes: Sequence[Wish]) -> list[_Work]:
        works: dict[int, _Work] = {}
        for wish in wishes:
            session = wish.session
            work = works.get(session.id)
            if work is None:
                work = works[session.id] = _Work(session, self._trunks[session.id])
            if wish.node == ROOT:
                work.trunk.attach(session.tokens)  # another session may have computed what comes next
                work.pending = session.length - work.trunk.computed
            else:
                work.nodes.append(wish.node)
                work.reach.append(math.exp(wish.log_reach))
        return list(works.values())

    def _best_shape(self, works: list[_Work]) -> tuple[Shape, list[_Work]]:
        """The shape, and the sessions in it, that gain the most reach probability per second."""
        best: tuple[float, Shape, list[_Work]] | None = None
        for shape in self._growth_shapes:
            gains = sorted(((work.gain(shape.rows), i) for i, work in enumerate(works)), reverse=True)
            chosen = [(gain, i) for gain, i in gains[: shape.sessions] if gain > 0]
            rate = sum(gain for gain, _ in chosen) / self.runner.cost(shape)
            if best is None or rate > best[0]:
                best = rate, shape, [works[i] for _, i in chosen]
        assert best is not None
        return best[1], best[2]

    def _run(self, shape: Shape, jobs: list[Job]) -> list[Growth]:
        moves = [move for moves in self._moves.values() for move in moves]
        self._moves = {}
        if len(moves) > shape.moves:
            self.runner.move(moves)
            moves = []
        inputs = build_inputs(shape, self.runner.table_pages, jobs, moves)
        ids, log_scores = self.runner.run(shape, inputs)
        self._step_tokens = sum(job.feed or len(job.nodes) for job in jobs)
        growths: list[Growth] = []
        for row, job in enumerate(jobs):
            growths += self._growths(job, ids[row], log_scores[row])
        return growths

    def _growths(self, job: Job, ids: NDArray[np.int32], log_scores: NDArray[np.float32]) -> list[Growth]:
        job.trunk.computed += job.feed
        if job.feed:
            job.trunk.publish(job.session.tokens)
        if job.feed and job.trunk.computed < job.session.length:
            return []
        nodes = (ROOT,) if job.feed else job.nodes
        return [self._growth(job.session, node, ids[i], log_scores[i]) for i, node in enumerate(nodes)]

    def _growth(
        self, session: DraftSession, node: int, ids: NDArray[np.int32], log_scores: NDArray[np.float32]
    ) -> Growth:
        likely = [
            (token, score)
            for token, score in zip(ids.tolist(), log_scores.tolist(), strict=True)
            if score >= _LEAST_EDGE
        ]
        tokens, scores = [token for token, _ in likely], [score for _, score in likely]
        return Growth(session, node, tokens, [-1] * len(tokens), scores)
