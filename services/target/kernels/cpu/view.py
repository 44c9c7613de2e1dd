"""A step's batch as the kernels read it."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from services.target.batch import Batch
from services.target.kernels.cpu.library import BatchView


class View:
    """A view of a batch, and the arrays that it points to. `pointer` is what the kernels take."""

    def __init__(self, batch: Batch) -> None:
        spans, rows = batch.spans, batch.rows
        arrays: list[NDArray[np.generic]] = [
            rows.ids,
            rows.positions,
            rows.sampled,
            np.array([*(span.first for span in spans), len(batch)], np.int64),
            np.array([span.start for span in spans], np.int64),
            np.array([span.committed for span in spans], np.int64),
            np.concatenate([span.parents for span in spans]).astype(np.int32, copy=False),
            np.concatenate([span.pages for span in spans]).astype(np.int32, copy=False),
            np.cumsum([0, *(len(span.pages) for span in spans[:-1])]),
        ]
        self._arrays = arrays
        self._view = BatchView(
            len(batch), len(spans), len(rows.sampled), spans[0].page_size, *(array.ctypes.data for array in arrays)
        )
        self.pointer = ctypes.byref(self._view)
