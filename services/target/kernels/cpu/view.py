"""A step's batch as the kernels read it."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from services.target.batch import Batch
from services.target.kernels.cpu.library import BatchView


class View:
    """A view of a batch, and the arrays that it points to. `pointer` is what the kernels take.

    pages: [n] int32, the page tables of its spans one after the other
    """

    def __init__(self, batch: Batch, *, gathered: bool = False) -> None:
        """gathered: the pools hold the batch's pages alone, those of its spans one after the other."""
        spans, rows = batch.spans, batch.rows
        pages = np.concatenate([span.pages for span in spans]).astype(np.int32, copy=False)
        self.pages = pages
        arrays: list[NDArray[np.generic]] = [
            rows.ids,
            rows.positions,
            rows.sampled,
            np.array([*(span.first for span in spans), len(batch)], np.int64),
            np.array([span.start for span in spans], np.int64),
            np.array([span.committed for span in spans], np.int64),
            np.concatenate([span.parents for span in spans]).astype(np.int32, copy=False),
            np.arange(len(pages), dtype=np.int32) if gathered else pages,
            np.cumsum([0, *(len(span.pages) for span in spans[:-1])]),
        ]
        self._arrays = arrays
        self._view = BatchView(
            len(batch), len(spans), len(rows.sampled), spans[0].page_size, *(array.ctypes.data for array in arrays)
        )
        self.pointer = ctypes.byref(self._view)
