"""EAGLE, EAGLE3 and NEXTN: a head drafts from the target's own hidden states.

Row j of the trunk pairs token j + 1 with the target's feature j, so the root's children come from row length - 2, and
they can be known only once the feature of the token before the root has come. Two tiers:

    own features    while the target is silent, the tree grows on what the head itself hands on. Accepted nodes' rows go
                    into the trunk, but they are provisional there.
    true features   once those of all committed rows have come, the provisional rows are computed again with them, and a
                    new tree grows from there. What the target knows already is not sent again.

Prompts are fed while the target computes them: its features stream in chunk by chunk, and each row's token is known.
A session whose features have not come yet is blocked; one that has lost some is opened again by the gateway, which asks
the target for all of them.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from outrider.errors import Unavailable
from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureSpec, decode, row_bytes
from outrider.speculation.shape import TreeShape
from services.draft.drafters.model import ModelDrafter, Work
from services.draft.model.programs.runner import ModelRunner
from services.draft.sessions.batch import Job, Shape
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS, Trunk
from services.draft.sessions.session import DraftSession

_SHIFT = 1
_TREES = (1, 4)  # sessions whose whole trees one program grows
# Rows that one session may have to catch up on in such a program: what a commit along another drafter's nodes leaves.
_LONG_COMMIT = 16
# Bytes of rows that may wait while nobody wants hints, which sessions share evenly; more are computed all the same, so
# that they do not pile up. What is computed then takes the time of plain steps where both share cores.
_MOST_HELD = 128 << 20


class FeatureDrafter(ModelDrafter):
    """Drafts with a head that the target feeds."""

    features: FeatureSpec

    def __init__(
        self, name: str, runner: ModelRunner, prefix: PrefixCache, max_running: int, chunk: int, features: FeatureSpec,
        fusion: bytes = b"",
    ) -> None:  # fmt: skip
        """name: the algorithm's. features, fusion: what is asked of the target. Others as of ModelDrafter."""
        super().__init__(runner, prefix, max_running, chunk)
        self.name = name
        self.features = features
        self.fusion = fusion
        self._row_bytes = row_bytes(runner.feature_width, features.format)
        self._tree: TreeShape | None = None  # of explicit trees that one program grows
        self._tree_shapes: list[Shape] = []

    def follow(self, tree: TreeShape) -> None:
        """As of ModelDrafter; where few sessions are drafted for, a tree is one program."""
        super().follow(tree)
        if not self.runner.stacked and tree.expansions <= SCRATCH_SLOTS and self.runner.children == tree.topk:
            self._tree = tree
            sizes = [size for size in _TREES if size <= self._max_running]
            rows = tree.steps + 1  # what a commit along its own nodes leaves
            self._tree_shapes = [Shape(size, rows, 1, tree) for size in sizes]
            if rows < _LONG_COMMIT:
                self._tree_shapes.append(Shape(1, _LONG_COMMIT, 1, tree))

    @property
    def shapes(self) -> list[Shape]:
        """All that rounds may have."""
        return [*super().shapes, *self._tree_shapes]

    def new_trunk(self, session: DraftSession) -> Trunk:
        """Row j is token j + 1."""
        return Trunk(self.prefix, session.tokens, session.cache_salt, _SHIFT)

    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """Take the rows of accepted nodes over, provisionally. Their children serve until the true features come."""
        trunk = self.accept(session, count, path)
        return trunk.computed == session.length + count - _SHIFT

    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """Free the slots of nodes that are gone. Without children of the root, provisional rows are of no use."""
        super().did_commit(session, kept)
        if not session.root_expanded:
            self._forget_provisional(session)

    def fed(self, session: DraftSession) -> None:
        """Begin anew at the root if it can be computed with the target's features; else see whether it must wait.

        Raises Unavailable for features that are missing, or of another width.
        """
        trunk, held = self.trunks[session.id], session.features
        held.skip(trunk.settled)
        if held.lost or held.first > trunk.settled:
            raise Unavailable("hidden states of its tokens are missing")
        if held and held.width != self._row_bytes:
            raise Unavailable(f"its hidden states have {held.width} bytes a token, not {self._row_bytes}")
        if session.root_expanded and trunk.settled < session.length - _SHIFT <= held.end:
            session.replant()
            self._forget_provisional(session)
        session.blocked = not session.root_expanded and self.pending(session, trunk) == 0
        session.set_urgent(not session.root_expanded and self._piles_up(session))

    def _piles_up(self, session: DraftSession) -> bool:
        return len(session.features) * self._row_bytes * len(self.trunks) > _MOST_HELD

    def _forget_provisional(self, session: DraftSession) -> None:
        self.trunks[session.id].forget_provisional()
        self.moves.pop(session.id, None)

    def pending(self, session: DraftSession, trunk: Trunk) -> int:
        """Rows whose features have come. Those that the prefix cache has need none."""
        session.features.skip(trunk.settled)
        count = max(min(session.features.end, session.length - _SHIFT) - trunk.settled, 0)
        session.blocked = count == 0
        return count

    def best_round(self, works: list[Work]) -> tuple[Shape, list[Work]]:
        """As of ModelDrafter, or whole trees, where those that have waited longest can have them for less."""
        shape, chosen = super().best_round(works)
        if self._tree is None:
            return shape, chosen
        works = sorted(works, key=lambda work: -work.session.rounds_waited)
        trees = [(shape, self._takers(works, shape)) for shape in self._tree_shapes]
        costs = [(self.runner.cost(shape) / len(takers), i) for i, (shape, takers) in enumerate(trees) if takers]
        if not costs:
            return shape, chosen
        cost, best = min(costs)
        if not self.fits_level(works[0]):  # the turn of one that has no other way
            return trees[best]
        levels = self._tree.steps * self.runner.cost(shape) / len(chosen)  # a round each
        return (shape, chosen) if cost > levels else trees[best]

    def _takers(self, works: list[Work], shape: Shape) -> list[Work]:
        """The first sessions, as far as they can have whole trees from a program."""
        fitting = itertools.takewhile(lambda work: self._takes_tree(work, shape.rows), works)
        return list(itertools.islice(fitting, shape.sessions))

    def _takes_tree(self, work: Work, rows: int) -> bool:
        assert self._tree is not None
        reaches_root = work.trunk.settled + work.pending == work.session.length - _SHIFT
        return reaches_root and 0 < work.pending <= rows and work.session.takes_whole(self._tree)

    def fits_round(self, work: Work) -> bool:
        """As of ModelDrafter; what is behind after a long commit fits, too, where a whole tree comes with it."""
        return self.fits_level(work) or (self._tree is not None and self._takes_tree(work, _LONG_COMMIT))

    def job(self, work: Work, rows: int) -> Job:
        """Rows of the trunk take their features along."""
        if not work.pending:
            return super().job(work, rows)
        feed, held = min(work.pending, rows), work.session.features
        features = self.features_of(held.take(feed))
        work.session.set_urgent(self._piles_up(work.session))
        return Job(work.session, work.trunk, feed=feed, features=features)

    def features_of(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """What rows of the target are for the model. rows: [n, row bytes]. Returns [n, width]."""
        return decode(rows, self.features.format)
