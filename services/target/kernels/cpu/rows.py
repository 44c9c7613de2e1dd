"""A step's batch as the kernels read it."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from services.target.batch import Batch
from services.target.kernels.cpu.library import BatchView


class Rows:
    """A view of a batch, and the arrays that it points to. The batch must outlive it."""

    def __init__(self, batch: Batch) -> None:
        spans = batch.spans
        first = [span.first for span in spans]
        table = np.cumsum([0, *(len(span.pages) for span in spans[:-1])])
        arrays: list[NDArray[np.generic]] = [
            np.array([*first, len(batch)], np.int64),
            np.array([span.start for span in spans], np.int64),
            np.array([span.committed for span in spans], np.int64),
            np.concatenate([span.parents for span in spans]).astype(np.int32, copy=False),
            np.concatenate([span.pages for span in spans]).astype(np.int32, copy=False),
            table,
        ]
        self._kept = (batch, arrays)
        self.view = BatchView(
            len(batch), len(spans), len(batch.sampled), spans[0].page_size,
            batch.ids.data_ptr(), batch.positions.data_ptr(), batch.sampled.data_ptr(),
            *(array.ctypes.data for array in arrays),
        )  # fmt: skip
        self.pointer = ctypes.byref(self.view)
