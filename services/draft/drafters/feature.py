"""EAGLE, EAGLE3 and NEXTN: a head drafts from the target's own hidden states.

Row j of the prefix KV pairs token j + 1 with the target's feature j. The root's children therefore come from row
length - 2, and are known only after the feature of the token before the root has arrived. Two tiers:

    own features    until the target's features arrive, the tree grows on the states that the head passes on. Rows of
                    accepted nodes move into the prefix KV, where they are provisional.
    true features   after those of all committed rows have arrived, the provisional rows are computed again from them,
                    and a new tree grows, the first levels in one program. Nodes that the target knows are
                    not sent again.

Without drafting ahead (`wait_for_features`) there is the second tier alone.

The head processes a prompt while the target computes it: features arrive chunk by chunk, and each row's token is known.
A session is blocked until its features arrive; the gateway opens a session that has lost some again, and requests all
of them from the target.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import not_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import Unavailable
from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureSpec, row_bytes
from outrider.speculation.shape import TreeShape
from services.draft.drafters.model import ModelDrafter, PendingWork
from services.draft.model.programs.runner import ModelRunner
from services.draft.sessions.batch import Growth, SessionWork, StepShape
from services.draft.sessions.features import numbers_of
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS, PrefixKV
from services.draft.sessions.session import DraftSession

_SHIFT = 1
# Pending rows of a session in such a program, for commits along another drafter's nodes.
_LONG_COMMIT = 16
# What one program grows of adaptive trees. A program with many sessions expands fewer nodes of each, as the target then
# verifies fewer.
GROWTHS = (
    StepShape(1, 8, 1, Growth(rounds=4, width=4)),
    StepShape(4, 8, 1, Growth(rounds=3, width=4)),
    StepShape(16, 8, 1, Growth(rounds=3, width=2)),
)
# Rounds that other work may wait while programs grow trees.
_PATIENCE = 4
# Bytes of rows that may wait while drafting is paused, shared evenly by the sessions. Beyond that rows are computed, so
# that they do not accumulate; on shared cores that slows down the target's plain steps.
_MAX_HELD_BYTES = 128 << 20


class FeatureDrafter(ModelDrafter):
    """Drafts with a head that reads the target's features. received_row_bytes: of a row as the target sends it."""

    features: FeatureSpec
    tree_sessions: Sequence[int] = (1, 4)
    """Numbers of sessions whose explicit trees one program grows; read by `set_tree_shape`."""

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
        self._tree_shapes: list[StepShape] = []  # of programs that grow trees, or several levels of them

    def set_tree_shape(self, tree: TreeShape) -> None:
        """As of ModelDrafter; for few sessions one program grows a whole tree."""
        super().set_tree_shape(tree)
        if not self.runner.stacked and tree.expansions <= SCRATCH_SLOTS and self.runner.children == tree.topk:
            sizes = [size for size in self.tree_sessions if size <= self._max_running]
            rows = tree.steps + 1  # pending after a commit along its own nodes
            self._tree_shapes = [StepShape(size, rows, 1, tree) for size in sizes]
            if rows < _LONG_COMMIT:
                self._tree_shapes.append(StepShape(1, _LONG_COMMIT, 1, tree))

    def set_growth(self, shapes: Sequence[StepShape] = GROWTHS) -> None:
        """Grow several levels of adaptive trees in one program, which returns once they are there: for devices that a
        program keeps busy for less time than the host needs between two. Called before the warm-up."""
        for shape in shapes:
            fits = shape.sessions <= self._max_running and shape.tree is not None and not self.runner.stacked
            if fits and isinstance(shape.tree, Growth) and shape.tree.width <= self.runner.children:
                self._tree_shapes.append(shape)

    @property
    def grows_in_programs(self) -> bool:
        """True if one program grows several levels of a tree."""
        return bool(self._tree_shapes)

    def wait_for_features(self) -> None:
        """Grow a tree once after each commit, when the target's features have arrived."""
        self.drafts_ahead = False

    def grow_by_levels(self) -> None:
        """Never grow several levels in one program."""
        self._tree_shapes = []

    @property
    def shapes(self) -> list[StepShape]:
        """All shapes of rounds."""
        return [*super().shapes, *self._tree_shapes]

    def new_prefix_kv(self, session: DraftSession) -> PrefixKV:
        """Row j is token j + 1."""
        return PrefixKV(self.prefix, session.tokens, session.cache_salt, _SHIFT)

    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """Move the rows of accepted nodes, provisionally. Their children serve until the true features arrive."""
        prefix_kv = self.accept(session, count, path if self.drafts_ahead else [])
        return self.drafts_ahead and prefix_kv.computed == session.length + count - _SHIFT

    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """Free scratch slots. Without children of the root, provisional rows are useless.

        Without drafting ahead what survives of the tree is dropped; the target keeps it until the next tree comes.
        """
        super().did_commit(session, kept)
        if not session.root_expanded:
            self._forget_provisional(session)
        if not self.drafts_ahead and len(session.tree):
            session.regrow()

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
        """As of ModelDrafter, or several levels for the sessions that have waited longest, where these cost less."""
        shape, chosen = super().best_round(works)
        if not self._tree_shapes or not any(work.pending for work in works):
            return shape, chosen
        works = sorted(works, key=lambda work: -work.session.rounds_waited)
        trees = [(shape, self._tree_works(works, shape)) for shape in self._tree_shapes]
        costs = [(self._level_cost(*tree), i) for i, tree in enumerate(trees) if tree[1]]
        if not costs:
            return shape, chosen
        cost, best = min(costs)
        # Only a whole tree can serve the session that has waited longest, or the root's children would be all it gets.
        if not self.fits_level(works[0]) or not self.drafts_ahead:
            return trees[best]
        return (shape, chosen) if cost > self._level_cost(shape, chosen) else trees[best]

    def _level_cost(self, shape: StepShape, works: list[PendingWork]) -> float:
        """What a level of a session costs."""
        return self.runner.cost(shape) / (len(works) * (1 if shape.tree is None else shape.tree.steps))

    def _tree_works(self, works: list[PendingWork], shape: StepShape) -> list[PendingWork]:
        """Sessions whose trees one program can grow, if no other one has waited too long. works: the longest first."""
        takes = [self._takes_tree(work, shape) for work in works]
        if not isinstance(shape.tree, Growth):
            takes = list(itertools.takewhile(bool, takes))
        elif any(work.session.rounds_waited > _PATIENCE for work in itertools.compress(works, map(not_, takes))):
            return []
        return list(itertools.islice(itertools.compress(works, takes), shape.sessions))

    def _takes_tree(self, work: PendingWork, shape: StepShape) -> bool:
        session, prefix_kv, tree = work.session, work.prefix_kv, shape.tree
        reaches_root = prefix_kv.settled + work.pending == session.length - _SHIFT
        if tree is None or not reaches_root or not 0 < work.pending <= shape.rows:
            return False
        if isinstance(tree, TreeShape):
            return session.grower.accepts_whole_tree(tree)
        unused = prefix_kv.free_slots == SCRATCH_SLOTS
        return unused and session.draft_budget >= tree.steps and session.grower.accepts_growth(tree.steps)

    def fits_round(self, work: PendingWork) -> bool:
        """As of ModelDrafter; the rows of a long commit fit as well, if a whole tree grows from them."""
        return self.fits_level(work) or any(self._takes_tree(work, shape) for shape in self._tree_shapes)

    def session_work(self, work: PendingWork, rows: int) -> SessionWork:
        """As of ModelDrafter; rows of the prefix KV come with their features."""
        if not work.pending:
            return super().session_work(work, rows)
        if not self.drafts_ahead and not self.fits_round(work):  # the tree grows from the last row of a prompt
            rows = min(rows, work.pending - 1)
        feed, held = min(work.pending, rows), work.session.features
        features = self.features_of(held.take(feed))
        work.session.set_urgent(self._exceeds_share(work.session))
        return SessionWork(work.session, work.prefix_kv, feed=feed, features=features)

    def features_of(self, rows: NDArray[np.uint8]) -> NDArray[Any]:
        """Received rows as the model's features. rows: [n, row bytes]. Returns [n, width]."""
        return numbers_of(rows, self.features.format)
