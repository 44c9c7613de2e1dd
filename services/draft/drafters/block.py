"""DFLASH and P-EAGLE: a block drafter predicts several positions in one pass, from the target's hidden states.

Row j of the prefix KV is made from the target's feature j, of a P-EAGLE head also from token j + 1 and the rows before.
It is final once it is computed, and no node of a tree has a row. After each commit, when the features of its tokens
have arrived, one program computes their rows and the block behind the root; the tree of the block's candidates
(block_tree.py) is one proposal. Nothing is drafted ahead: the next block needs the next features.

Features of a prompt are computed as they arrive, in chunks without a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureSpec
from outrider.speculation.shape import TreeShape
from services.draft.drafters.feature import FeatureDrafter
from services.draft.drafters.model import PendingWork
from services.draft.model.layers.heads import BlockHead, ParallelHead
from services.draft.model.programs.runner import ModelRunner
from services.draft.sessions.batch import Block, SessionWork, StepShape
from services.draft.sessions.session import DraftSession

_SHORT_COMMIT = 4  # rows of a commit that most commits of a single session fit into


class BlockDrafter(FeatureDrafter):
    """Drafts a block behind each commit."""

    one_pass = True

    def __init__(
        self, name: str, runner: ModelRunner, prefix: PrefixCache, max_running: int, chunk: int, features: FeatureSpec,
        fusion: bytes = b"",
    ) -> None:  # fmt: skip
        """As of FeatureDrafter."""
        super().__init__(name, runner, prefix, max_running, chunk, features, fusion)
        head = runner.config.head
        assert isinstance(head, BlockHead | ParallelHead)
        self._size = head.size
        self._set_blocks()

    def set_batch_sizes(self, sizes: Sequence[int]) -> None:
        """As of ModelDrafter."""
        self._sizes = sorted({1, *sizes})
        self._set_blocks()

    def set_tree_shape(self, tree: TreeShape) -> None:
        """Compute as many positions as the tree has levels, and keep unlikely candidates. Called before the warm-up."""
        self.executor.min_edge = -math.inf
        self._size = tree.steps + 1
        self._set_blocks()

    def set_growth(self, shapes: Sequence[StepShape] = ()) -> None:
        """Nothing to do: a block is as deep as it gets."""
        del shapes

    def _set_blocks(self) -> None:
        """Programs for a commit's rows, at most as many as a block has positions, and the block behind them."""
        sizes = list(self._sizes)
        count = next((i for i, size in enumerate(sizes) if size >= self._max_running), len(sizes) - 1)
        shapes = [StepShape(size, self._size, 1, Block(self._size)) for size in sizes[: count + 1]]
        if self._size > _SHORT_COMMIT:
            shapes.insert(0, StepShape(1, _SHORT_COMMIT, 1, Block(self._size)))
        self.set_expansion_shapes(shapes)

    # --- commits ---

    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """Reserve room for the rows of the tokens. The nodes of the tree have none, so the next block is a new one."""
        del path
        self.accept(session, count, [])
        return False

    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """Drop what survives of the tree: the next block replaces it, and the target keeps it until then."""
        super().did_commit(session, kept)
        if len(session.tree):
            session.regrow()

    # --- rounds ---

    def fits_level(self, work: PendingWork) -> bool:
        """True if a block follows from the pending rows, and one program can compute them."""
        return self._reaches_root(work) and super().fits_level(work)

    def session_work(self, work: PendingWork, rows: int) -> SessionWork:
        """As of FeatureDrafter; a chunk of many rows leaves one, behind which the block stands."""
        if self._reaches_root(work) and not self.fits_level(work):
            rows = min(rows, work.pending - 1)
        return super().session_work(work, rows)

    def _reaches_root(self, work: PendingWork) -> bool:
        return work.prefix_kv.settled + work.pending == work.session.length - work.prefix_kv.shift
