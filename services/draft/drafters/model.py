"""What drafters with a model have in common: STANDALONE's small decoders, and heads that the target feeds.

    trunk   committed tokens that the cache lacks are fed; the last of them gives the root's children
    nodes   the most promising leaves are expanded, all of a round in one call of the model

A round is one compiled program of one of a few shapes. Which one is a matter of measured cost: the shape that gains the
most reach probability per second wins. Long prompts are fed in chunks that take turns with rounds of growth.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.paging.prefix import PrefixCache
from outrider.serving.messages import EngineLoad
from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT
from outrider.telemetry import Progress, no_progress
from services.draft.drafters.base import Drafter, Growth, Wish
from services.draft.model.programs.runner import ModelRunner
from services.draft.sessions.batch import Job, Shape, build_inputs
from services.draft.sessions.prefix_kv import Trunk
from services.draft.sessions.session import DraftSession

# Candidates below this edge probability are not worth a node.
_LEAST_EDGE = math.log(2e-3)
# What a round of waiting adds to the gain of feeding a root, so that the narrow shapes cannot starve it.
_PATIENCE_GAIN = 0.25


@dataclass
class Work:
    """What one session would like a round to do: feed `pending` rows, or expand nodes, best first."""

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


def growth_shapes(max_running: int, tree: TreeShape | None = None) -> list[Shape]:
    """Shapes of rounds of growth, small to large. tree: of explicit trees: a level of one takes a round, or the root,
    fed with what a step can commit.
    """
    sizes = [1, 4, 16, 64]
    count = next((i for i, size in enumerate(sizes) if size >= max_running), len(sizes) - 1)
    rows = {1: (1, 4, 8), 4: (1, 4), 16: (1, 4), 64: (2,)}
    if tree is not None:
        rows = dict.fromkeys(sizes, tuple(sorted({tree.topk, tree.steps + 1})))
    return [Shape(size, q, q) for size in sizes[: count + 1] for q in rows[size]]


class ModelDrafter(Drafter):
    """Rounds, pages and the rows of all sessions. What differs: `new_trunk`, `pending`, `will_commit`, `job`."""

    def __init__(self, runner: ModelRunner, prefix: PrefixCache, max_running: int, chunk: int) -> None:
        """chunk: tokens of a prompt that are fed at a time."""
        self.runner = runner
        self.prefix = prefix
        self.eos_token_ids = runner.config.eos_token_ids
        self.max_session_tokens = min(runner.config.context, runner.table_pages * runner.page_size)
        self._max_running = max_running
        self._chunk_shape = Shape(1, chunk, 1)
        self._least_edge = _LEAST_EDGE
        self._grow_in(growth_shapes(max_running))
        self.trunks: dict[int, Trunk] = {}
        self.moves: dict[int, list[tuple[int, int]]] = {}  # by session: rows to move before the next step
        self._fed_chunk = False  # the last round was a chunk
        self._step_tokens = 0

    def follow(self, tree: TreeShape) -> None:
        """Grow trees of a fixed shape, in which no candidate is too unlikely. Called before the warm-up."""
        self._least_edge = -math.inf
        self._grow_in(growth_shapes(self._max_running, tree))

    def _grow_in(self, shapes: list[Shape]) -> None:
        self._growth_shapes = shapes
        self._most_rows = max(shape.rows for shape in shapes if shape.sessions == 1)

    def warm_up(self, tell: Progress = no_progress) -> None:
        """Compile and measure every shape."""
        self.runner.warm_up(self.shapes, tell)

    @property
    def shapes(self) -> list[Shape]:
        """All that rounds may have."""
        return [*self._growth_shapes, self._chunk_shape]

    # --- sessions ---

    def open(self, session: DraftSession) -> None:
        """Lease trunk and scratch. Raises OutOfPages."""
        self.trunks[session.id] = self.new_trunk(session)

    @abstractmethod
    def new_trunk(self, session: DraftSession) -> Trunk:
        """Trunk and scratch of a new session. Raises OutOfPages."""

    @abstractmethod
    def pending(self, session: DraftSession, trunk: Trunk) -> int:
        """Rows of the trunk that can be fed now. Asked while the root's children are wanted."""

    def close(self, session: DraftSession) -> None:
        """Give the pages back."""
        pending = len(self.moves.pop(session.id, ()))
        trunk = self.trunks.pop(session.id)
        trunk.publish(session.tokens, pending)
        trunk.release()

    def accept(self, session: DraftSession, count: int, path: list[int]) -> Trunk:
        """Take the rows of accepted nodes over into the trunk. Arguments as of `will_commit`. Returns the trunk."""
        trunk = self.trunks[session.id]
        if moves := trunk.accept(session.length, count, path):
            self.moves.setdefault(session.id, []).extend(moves)
        return trunk

    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """Free the slots of nodes that are gone, or expanded no longer."""
        self.trunks[session.id].renumber(kept, session.frontiers[-1].expanded)

    def load(self) -> EngineLoad:
        """Pages, and rows of the last round."""
        allocator = self.prefix.allocator
        return EngineLoad(
            free_pages=allocator.free_pages,
            total_pages=allocator.total_pages,
            step_tokens=self._step_tokens,
            cached_pages=allocator.cached_pages,
            compilations=self.runner.compilations.while_serving,
        )

    def check(self) -> None:
        """Audit the pages against what the sessions hold."""
        tables = [table for trunk in self.trunks.values() for table in trunk.tables]
        self.prefix.allocator.check(tables=[table.pages.tolist() for table in tables])
        self.prefix.check()

    def flush(self) -> None:
        """Drop cached prefixes."""
        self.prefix.flush()

    # --- rounds ---

    def grow(self, wishes: Sequence[Wish]) -> list[Growth]:
        """Feed a chunk of a prompt, or grow the trees where it pays most."""
        works = [work for work in self._works(wishes) if work.pending or work.nodes]
        if not works:
            return []
        leaves = [work for work in works if self.fits_round(work)]
        prompts = [work for work in works if not self.fits_round(work)]
        self._fed_chunk = bool(prompts) and not (leaves and self._fed_chunk)
        if self._fed_chunk:
            # The shortest first, but none waits for ever.
            chunk = self._chunk_shape.rows
            work = min(prompts, key=lambda work: work.pending - chunk * work.session.rounds_waited)
            return self._run(self._chunk_shape, [self.job(work, chunk)])
        shape, chosen = self.best_round(leaves)
        return self._run(shape, [self.job(work, shape.rows) for work in chosen])

    def fits_round(self, work: Work) -> bool:
        """True if a round of growth can take on all that a session has to feed; else it is fed as prompts are."""
        return self.fits_level(work)

    def fits_level(self, work: Work) -> bool:
        """True if a round that grows one level can."""
        return work.pending <= self._most_rows

    def job(self, work: Work, rows: int) -> Job:
        """The part of a session's work that fits into a number of rows."""
        return Job(work.session, work.trunk, feed=min(work.pending, rows), nodes=tuple(work.nodes[:rows]))

    def _works(self, wishes: Sequence[Wish]) -> list[Work]:
        works: dict[int, Work] = {}
        for wish in wishes:
            session = wish.session
            work = works.get(session.id)
            if work is None:
                work = works[session.id] = Work(session, self.trunks[session.id])
            if wish.node == ROOT:
                work.trunk.attach(session.tokens)  # another session may have computed what comes next
                work.pending = self.pending(session, work.trunk)
            else:
                work.nodes.append(wish.node)
                work.reach.append(math.exp(wish.log_reach))
        return list(works.values())

    def best_round(self, works: list[Work]) -> tuple[Shape, list[Work]]:
        """The shape of a round, and the sessions in it, that gain the most reach probability per second."""
        best: tuple[float, Shape, list[Work]] | None = None
        for shape in self._growth_shapes:
            gains = sorted(((work.gain(shape.rows), i) for i, work in enumerate(works)), reverse=True)
            chosen = [(gain, i) for gain, i in gains[: shape.sessions] if gain > 0]
            rate = sum(gain for gain, _ in chosen) / self.runner.cost(shape)
            if best is None or rate > best[0]:
                best = rate, shape, [works[i] for _, i in chosen]
        assert best is not None
        return best[1], best[2]

    def _run(self, shape: Shape, jobs: list[Job]) -> list[Growth]:
        moves = self._due_moves(jobs)
        if len(moves) > shape.moves:
            self.runner.move(moves)
            moves = []
        inputs = build_inputs(self.runner.blank(shape), jobs, moves)
        self._step_tokens = sum(job.feed or len(job.nodes) for job in jobs)
        if shape.tree is not None:
            found = zip(jobs, *(part.tolist() for part in self.runner.grow(shape, inputs)), strict=False)
            return [growth for job, *nodes in found if (growth := self._tree_growth(job, *nodes)) is not None]
        ids, log_scores = self.runner.run(shape, inputs)
        growths: list[Growth] = []
        for row, job in enumerate(jobs):
            growths += self._growths(job, ids[row], log_scores[row])
        return growths

    def _due_moves(self, jobs: list[Job]) -> list[tuple[int, int]]:
        """All moves, but for those into rows that this step computes anew."""
        for job in jobs:
            if job.feed and job.session.id in self.moves:
                start = job.trunk.settled
                anew = set(job.trunk.table.slots(start, start + job.feed).tolist())
                self.moves[job.session.id] = [move for move in self.moves[job.session.id] if move[1] not in anew]
        moves = [move for moves in self.moves.values() for move in moves]
        self.moves = {}
        return moves

    def _fed(self, job: Job) -> bool:
        """The rows of a job have been fed. Returns True if nothing is missing before the root."""
        job.trunk.feed(job.feed)
        job.trunk.publish(job.session.tokens)
        return job.trunk.settled == job.session.length - job.trunk.shift

    def _tree_growth(self, job: Job, tokens: list[int], parents: list[int], scores: list[float]) -> Growth | None:
        return Growth(job.session, ROOT, tokens, parents, scores, whole=True) if self._fed(job) else None

    def _growths(self, job: Job, ids: NDArray[np.int32], log_scores: NDArray[np.float32]) -> list[Growth]:
        if job.feed and not self._fed(job):
            return []
        nodes = (ROOT,) if job.feed else job.nodes
        found = zip(nodes, ids.tolist(), log_scores.tolist(), strict=False)
        return [self._growth(job.session, node, tokens, scores) for node, tokens, scores in found]

    def _growth(self, session: DraftSession, node: int, tokens: list[int], scores: list[float]) -> Growth:
        """tokens, scores: candidates, best first."""
        count = sum(score > self._least_edge for score in scores)
        return Growth(session, node, tokens[:count], [-1] * count, scores[:count])
