"""A step's batch in the layout of the kernels."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from services.target.kernels.cpu.library import BatchView
from services.target.step.batch import Batch


class BatchPointers:
    """A C view of a batch, and the arrays that it points to. pointer: the kernels' argument.

    pages: [n] int32, the page tables of its spans, concatenated
    """

    def __init__(self, batch: Batch, *, gathered: bool = False) -> None:
        """gathered: the pools hold only the batch's pages, in the order of `pages`."""
        layout, rows = batch.layout, batch.rows
        self.pages = layout.pages
        arrays: list[NDArray[np.generic]] = [
            rows.ids,
            rows.positions,
            rows.sampled,
            layout.first,
            layout.start,
            layout.committed,
            layout.parents,
            np.arange(len(self.pages), dtype=np.int32) if gathered else self.pages,
            layout.table,
        ]
        self._arrays = arrays
        self._view = BatchView(
            len(batch), len(layout), len(rows.sampled), layout.page_size, *(array.ctypes.data for array in arrays)
        )
        self.pointer = ctypes.byref(self._view)
