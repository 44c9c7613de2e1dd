"""EAGLE, EAGLE3 and NEXTN: a head drafts from the target's own hidden states.

Row j of the prefix KV pairs token j + 1 with the target's feature j. The root's children therefore come from row
length - 2, and are known only after the feature of the token before the root has arrived. Two tiers:

    own features    until the target's features arrive, the tree grows on the states that the head passes on. Rows of
                    accepted nodes move into the prefix KV, where they are provisional.
    true features   after those of all committed rows have arrived, the provisional rows are computed again from them,
                    and a new tree grows. Nodes that the target knows are not sent again.

The head processes a prompt while the target computes it: features arrive chunk by chunk, and each row's token is known.
A session is blocked until its features arrive; the gateway opens a session that has lost some again, and requests all
of them from the target.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from outrider.errors import Unavailable
from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureSpec, decode, row_bytes
from outrider.speculation.shape import TreeShape
from services.draft.drafters.model import ModelDrafter, PendingWork
from services.draft.model.programs.runner import ModelRunner
from services.draft.sessions.batch import SessionWork, StepShape
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS, PrefixKV
from services.draft.sessions.session import DraftSession

_SHIFT = 1
_TREE_SESSIONS = (1, 4)  # sessions whose whole trees one program grows
# Pending rows of a session in such a program, for commits along another drafter's nodes.
_LONG_COMMIT = 16
# Bytes of rows that may wait while drafting is paused, shared evenly by the sessions. Beyond that rows are computed, so
# that they do not accumulate; on shared cores that slows down the target's plain steps.
_MAX_HELD_BYTES = 128 << 20


class FeatureDrafter(ModelDrafter):
    """Drafts with a head that reads the target's features. received_row_bytes: of a row as the target sends it."""

    features: FeatureSpec

    def __init__(
        self, name: str, runner: ModelRunner, prefix: PrefixCache, max_running: int, chunk: int, features: FeatureSpec,
        fusion: bytes = b"",
    ) -> None:  # fmt: skip
        """name: of the algorithm. features, fusion: requested from the target. Others as of ModelDrafter."""
        super().__init__(runner, prefix, max_running, chunk)
        self.name = name
        self.features = features
        self.fusion = fusion
        self.received_row_bytes = row_bytes(runner.feature_width, features.format)
        self._tree: TreeShape | None = None  # of explicit trees that one program grows
        self._tree_shapes: list[StepShape] = []

    def set_tree_shape(self, tree: TreeShape) -> None:
        """As of ModelDrafter; for few sessions one program grows a whole tree."""
        super().set_tree_shape(tree)
        if not self.runner.stacked and tree.expansions <= SCRATCH_SLOTS and self.runner.children == tree.topk:
            self._tree = tree
            sizes = [size for size in _TREE_SESSIONS if size <= self._max_running]
            rows = tree.steps + 1  # pending after a commit along its own nodes
            self._tree_shapes = [StepShape(size, rows, 1, tree) for size in sizes]
            if rows < _LONG_COMMIT:
                self._tree_shapes.append(StepShape(1, _LONG_COMMIT, 1, tree))

    def grow_by_levels(self) -> None:
        """Never grow a whole tree in one program."""
        self._tree = None

    @property
    def shapes(self) -> list[StepShape]:
        """All shapes of rounds."""
        return [*super().shapes, *self._tree_shapes]

    def new_prefix_kv(self, session: DraftSession) -> PrefixKV:
        """Row j is token j + 1."""
        return PrefixKV(self.prefix, session.tokens, session.cache_salt, _SHIFT)

    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """Move the rows of accepted nodes, provisionally. Their children serve until the true features arrive."""
        prefix_kv = self.accept(session, count, path)
        return prefix_kv.computed == session.length + count - _SHIFT

    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """Free scratch slots. Without children of the root, provisional rows are useless."""
        super().did_commit(session, kept)
        if not session.root_expanded:
            self._forget_provisional(session)

    def features_changed(self, session: DraftSession) -> None:
        """Regrow the tree if the root can be computed from the target's features; otherwise update `blocked`.

        Raises Unavailable for features that are missing, or of another width.
        """
        prefix_kv, held = self.prefix_kvs[session.id], session.features
        held.skip(prefix_kv.settled)
        if held.lost or held.first > prefix_kv.settled:
            raise Unavailable("hidden states of its tokens are missing")
        if held and held.width != self.received_row_bytes:
            raise Unavailable(f"its hidden states have {held.width} bytes a token, not {self.received_row_bytes}")
        if session.root_expanded and prefix_kv.settled < session.length - _SHIFT <= held.end:
            session.regrow()
            self._forget_provisional(session)
        session.blocked = not session.root_expanded and self.pending(session, prefix_kv) == 0
        session.set_urgent(not session.root_expanded and self._exceeds_share(session))

    def _exceeds_share(self, session: DraftSession) -> bool:
        return len(session.features) * self.received_row_bytes * len(self.prefix_kvs) > _MAX_HELD_BYTES

    def _forget_provisional(self, session: DraftSession) -> None:
        self.prefix_kvs[session.id].forget_provisional()
        self.executor.moves.pop(session.id, None)

    def pending(self, session: DraftSession, prefix_kv: PrefixKV) -> int:
        """Rows whose features have arrived. Rows from the prefix cache need none."""
        session.features.skip(prefix_kv.settled)
        count = max(min(session.features.end, session.length - _SHIFT) - prefix_kv.settled, 0)
        session.blocked = count == 0
        return count

    def best_round(self, works: list[PendingWork]) -> tuple[StepShape, list[PendingWork]]:
        """As of ModelDrafter, or whole trees for the sessions that have waited longest, where these cost less."""
        shape, chosen = super().best_round(works)
        if self._tree is None:
            return shape, chosen
        works = sorted(works, key=lambda work: -work.session.rounds_waited)
        trees = [(shape, self._tree_works(works, shape)) for shape in self._tree_shapes]
        costs = [(self.runner.cost(shape) / len(fitting), i) for i, (shape, fitting) in enumerate(trees) if fitting]
        if not costs:
            return shape, chosen
        cost, best = min(costs)
        if not self.fits_level(works[0]):  # only a whole tree can serve the session that has waited longest
            return trees[best]
        levels = self._tree.steps * self.runner.cost(shape) / len(chosen)  # a round each
        return (shape, chosen) if cost > levels else trees[best]

    def _tree_works(self, works: list[PendingWork], shape: StepShape) -> list[PendingWork]:
        """The first sessions, as far as one program can grow their whole trees."""
        fitting = itertools.takewhile(lambda work: self._takes_tree(work, shape.rows), works)
        return list(itertools.islice(fitting, shape.sessions))

    def _takes_tree(self, work: PendingWork, rows: int) -> bool:
        assert self._tree is not None
        reaches_root = work.prefix_kv.settled + work.pending == work.session.length - _SHIFT
        return reaches_root and 0 < work.pending <= rows and work.session.grower.accepts_whole_tree(self._tree)

    def fits_round(self, work: PendingWork) -> bool:
        """As of ModelDrafter; the rows of a long commit fit as well, if a whole tree grows from them."""
        return self.fits_level(work) or (self._tree is not None and self._takes_tree(work, _LONG_COMMIT))

    def session_work(self, work: PendingWork, rows: int) -> SessionWork:
        """As of ModelDrafter; rows of the prefix KV come with their features."""
        if not work.pending:
            return super().session_work(work, rows)
        feed, held = min(work.pending, rows), work.session.features
        features = self.features_of(held.take(feed))
        work.session.set_urgent(self._exceeds_share(work.session))
        return SessionWork(work.session, work.prefix_kv, feed=feed, features=features)

    def features_of(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Received rows as the model's features. rows: [n, row bytes]. Returns [n, width]."""
        return decode(rows, self.features.format)
