"""The common part of drafters with a model: STANDALONE's small decoders, and heads that read the target's features.

    prefill     committed tokens without a row in the prefix KV are computed; the last row gives the root's children
    expansion   the likeliest leaves are expanded, all of a round in one step of the model

A round is one compiled program of a few shapes. The shape is chosen by measured cost: the one that gains the most reach
probability per second. Long prompts are computed in chunks that alternate with rounds of expansion.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.paging.prefix import PrefixCache
from outrider.serving.messages import EngineLoad
from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT
from outrider.telemetry import Progress, no_progress
from services.draft.drafters.base import Drafter, ExpandRequest, Expansion
from services.draft.drafters.execution import StepExecutor
from services.draft.model.programs.runner import ModelRunner
from services.draft.sessions.batch import SessionWork, StepShape
from services.draft.sessions.prefix_kv import PrefixKV
from services.draft.sessions.session import DraftSession

# Gain of a root for each round of waiting, so that shapes with few rows cannot starve it.
_WAITING_GAIN = 0.25
BATCH_SIZES = (1, 4, 16, 64)
_SMALL_BATCH = 16  # larger ones expand two nodes a session


@dataclass
class PendingWork:
    """Work that a session has for a round: `pending` rows to compute, or nodes to expand, best first."""

    session: DraftSession
    prefix_kv: PrefixKV
    pending: int = 0
    nodes: list[int] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)

    def gain(self, rows: int) -> float:
        """Reach probability of the nodes that `rows` rows would expand."""
        if self.pending:
            return 1.0 + _WAITING_GAIN * self.session.rounds_waited if self.pending <= rows else 0.0
        return sum(self.reach[:rows])


def expansion_shapes(
    max_running: int, tree: TreeShape | None = None, sizes: Sequence[int] = BATCH_SIZES
) -> list[StepShape]:
    """Shapes of rounds of expansion, small to large.

    tree: of explicit trees; then a round expands a level, or computes the rows of a commit and expands the root.
    sizes: sessions in a round; those beyond the first that holds `max_running` sessions are left out
    """
    sizes = sorted({1, *sizes})
    count = next((i for i, size in enumerate(sizes) if size >= max_running), len(sizes) - 1)
    level = None if tree is None else tuple(sorted({tree.topk, tree.steps + 1}))
    return [StepShape(size, q, q) for size in sizes[: count + 1] for q in level or _adaptive_rows(size)]


def _adaptive_rows(sessions: int) -> tuple[int, ...]:
    """Rows a session of the rounds that grow adaptive trees."""
    if sessions == 1:
        return (1, 4, 8)
    return (1, 4) if sessions <= _SMALL_BATCH else (2,)


class ModelDrafter(Drafter):
    """Rounds, pages and prefix KV of all sessions. Subclasses define `new_prefix_kv`, `pending` and `will_commit`."""

    def __init__(self, runner: ModelRunner, prefix: PrefixCache, max_running: int, chunk: int) -> None:
        """chunk: tokens of a prompt that a step computes."""
        self.runner = runner
        self.prefix = prefix
        self.executor = StepExecutor(runner)
        self.eos_token_ids = runner.config.eos_token_ids
        self.max_session_tokens = min(runner.config.context, runner.table_pages * runner.page_size)
        self.prefix_kvs: dict[int, PrefixKV] = {}  # by session
        self._max_running = max_running
        self._sizes: Sequence[int] = BATCH_SIZES
        self._chunk_shape = StepShape(1, chunk, 1)
        self._ran_chunk = False  # the last round computed a chunk of a prompt
        self.set_expansion_shapes(expansion_shapes(max_running))

    def set_batch_sizes(self, sizes: Sequence[int]) -> None:
        """Compile rounds for these numbers of sessions, and for one. Called before `set_tree_shape`."""
        self._sizes = sizes
        self.set_expansion_shapes(expansion_shapes(self._max_running, sizes=sizes))

    def set_tree_shape(self, tree: TreeShape) -> None:
        """Grow explicit trees, which keep unlikely candidates. Called before the warm-up."""
        self.executor.min_edge = -math.inf
        self.set_expansion_shapes(expansion_shapes(self._max_running, tree, self._sizes))

    def set_expansion_shapes(self, shapes: list[StepShape]) -> None:
        """Set the shapes of rounds of expansion. Called before the warm-up."""
        self._expansion_shapes = shapes
        fewest = min(shape.sessions for shape in shapes)
        self._max_rows = max(shape.rows for shape in shapes if shape.sessions == fewest)

    def warm_up(self, report: Progress = no_progress) -> None:
        """Compile and measure every shape."""
        self.runner.warm_up(self.shapes, report)

    @property
    def shapes(self) -> list[StepShape]:
        """All shapes of rounds."""
        return [*self._expansion_shapes, self._chunk_shape]

    # --- sessions ---

    def open(self, session: DraftSession) -> None:
        """Lease prefix KV and scratch. Raises OutOfPages."""
        self.prefix_kvs[session.id] = self.new_prefix_kv(session)

    @abstractmethod
    def new_prefix_kv(self, session: DraftSession) -> PrefixKV:
        """Prefix KV and scratch of a new session. Raises OutOfPages."""

    @abstractmethod
    def pending(self, session: DraftSession, prefix_kv: PrefixKV) -> int:
        """Rows of the prefix KV that can be computed now. Called while the root is to be expanded."""

    def close(self, session: DraftSession) -> None:
        """Release the pages."""
        pending = len(self.executor.moves.pop(session.id, ()))
        prefix_kv = self.prefix_kvs.pop(session.id)
        prefix_kv.publish(session.tokens, pending)
        prefix_kv.release()

    def accept(self, session: DraftSession, count: int, path: list[int]) -> PrefixKV:
        """Move the rows of accepted nodes into the prefix KV, which is returned. Arguments as of `will_commit`."""
        prefix_kv = self.prefix_kvs[session.id]
        if moves := prefix_kv.accept(session.length, count, path):
            self.executor.moves.setdefault(session.id, []).extend(moves)
        return prefix_kv

    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """Free the scratch slots of nodes that are gone, or no longer expanded."""
        self.prefix_kvs[session.id].renumber(kept, session.frontiers[-1].expanded)

    def placed(self, session: DraftSession, nodes: Sequence[int | None], places: Sequence[int]) -> None:
        """The slots of expanded nodes that one program has grown."""
        expanded, parents = session.frontiers[-1].expanded, session.tree.parent
        found = [(node, place) for node, place in zip(nodes, places, strict=True) if node in expanded and place >= 0]
        self.prefix_kvs[session.id].place([(node, parents[node], place) for node, place in found if node is not None])

    def load(self) -> EngineLoad:
        """Pages, and tokens of the last round."""
        allocator = self.prefix.allocator
        return EngineLoad(
            free_pages=allocator.free_pages,
            total_pages=allocator.total_pages,
            step_tokens=self.executor.step_tokens,
            cached_pages=allocator.cached_pages,
            compilations=self.runner.compilations.while_serving,
        )

    def check(self) -> None:
        """Audit the pages against the page tables of the sessions."""
        tables = [table for prefix_kv in self.prefix_kvs.values() for table in prefix_kv.tables]
        self.prefix.allocator.check(tables=[table.pages.tolist() for table in tables])
        self.prefix.check()

    def flush(self) -> None:
        """Drop cached prefixes."""
        self.prefix.flush()

    # --- rounds ---

    def expand(self, requests: Sequence[ExpandRequest]) -> list[Expansion]:
        """Compute a chunk of a prompt, or expand nodes in the shape with the highest gain per second."""
        works = [work for work in self._pending_works(requests) if work.pending or work.nodes]
        if not works:
            return []
        leaves = [work for work in works if self.fits_round(work)]
        prompts = [work for work in works if not self.fits_round(work)]
        self._ran_chunk = bool(prompts) and not (leaves and self._ran_chunk)
        if self._ran_chunk:
            # The shortest prompt first; waiting counts as a shorter one, so that none starves.
            chunk = self._chunk_shape.rows
            work = min(prompts, key=lambda work: work.pending - chunk * work.session.rounds_waited)
            return self.executor.run(self._chunk_shape, [self.session_work(work, chunk)])
        shape, chosen = self.best_round(leaves)
        return self.executor.run(shape, [self.session_work(work, shape.rows) for work in chosen])

    def fits_round(self, work: PendingWork) -> bool:
        """True if a round of expansion can compute all pending rows; otherwise they are computed in chunks."""
        return self.fits_level(work)

    def fits_level(self, work: PendingWork) -> bool:
        """True if a round that expands one level can compute all pending rows."""
        return work.pending <= self._max_rows

    def session_work(self, work: PendingWork, rows: int) -> SessionWork:
        """The part of a session's work that fits into `rows` rows."""
        return SessionWork(work.session, work.prefix_kv, feed=min(work.pending, rows), nodes=tuple(work.nodes[:rows]))

    def _pending_works(self, requests: Sequence[ExpandRequest]) -> list[PendingWork]:
        works: dict[int, PendingWork] = {}
        for request in requests:
            session = request.session
            work = works.get(session.id)
            if work is None:
                work = works[session.id] = PendingWork(session, self.prefix_kvs[session.id])
            if request.node == ROOT:
                work.prefix_kv.attach(session.tokens)  # another session may have computed the next rows
                work.pending = self.pending(session, work.prefix_kv)
            else:
                work.nodes.append(request.node)
                work.reach.append(math.exp(request.log_reach))
        return list(works.values())

    def best_round(self, works: list[PendingWork]) -> tuple[StepShape, list[PendingWork]]:
        """The shape of a round, and its sessions, with the highest gain of reach probability per second."""
        best: tuple[float, StepShape, list[PendingWork]] | None = None
        for shape in self._expansion_shapes:
            gains = sorted(((work.gain(shape.rows), i) for i, work in enumerate(works)), reverse=True)
            chosen = [(gain, i) for gain, i in gains[: shape.sessions] if gain > 0]
            rate = sum(gain for gain, _ in chosen) / self.runner.cost(shape)
            if best is None or rate > best[0]:
                best = rate, shape, [works[i] for _, i in chosen]
        assert best is not None
        return best[1], best[2]
