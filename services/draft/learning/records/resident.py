"""The target's states of all training records in the memory of an accelerator, from which batches gather them.

Copying states from disk for each batch takes longer than an accelerator's step. One copy of all of them is a few
gigabytes for millions of tokens of a small target; where they do not fit, batches contain their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from services.draft.learning.records.batches import Batch, RecordSource

_SHARE = 0.4  # of the device's memory
_SLAB_ROWS = 1 << 16  # copied at a time


class ResidentStates:
    """States of records on the device. starts: row of each record's first state; row 0 is zero, for empty places."""

    def __init__(self, reader: RecordSource, indices: Sequence[int]) -> None:
        """indices: of the records, in order of their index where reading is to be fast."""
        counts = reader.entries["rows"].astype(np.int64)
        self.starts = np.zeros(len(counts), np.int64)
        ends = 1 + np.cumsum(counts[indices])
        self.starts[indices] = ends - counts[indices]
        size = int(ends[-1]) if len(indices) else 1
        padded = -(-size // _SLAB_ROWS) * _SLAB_ROWS  # so that every slab fits
        self._rows = jnp.zeros((padded, reader.row_bytes // 2), jnp.bfloat16)
        for first, slab in _slabs(reader, indices):
            self._rows = _put(self._rows, slab, first)
        self._gather = jax.jit(lambda rows, places: rows[places])

    def fill(self, batch: Batch) -> Batch:
        """A batch whose states are rows of this array, with the states themselves."""
        return batch._replace(states=self._gather(self._rows, batch.states))


@partial(jax.jit, donate_argnums=0)
def _put(rows: jax.Array, slab: jax.Array, first: int) -> jax.Array:
    return jax.lax.dynamic_update_slice(rows, slab, (first, 0))


def _slabs(reader: RecordSource, indices: Sequence[int]) -> Iterator[tuple[int, NDArray[Any]]]:
    """The array in slabs of equal size, with the place of each."""
    width = reader.row_bytes // 2
    slab, first, used = np.zeros((_SLAB_ROWS, width), ml_dtypes.bfloat16), 0, 1
    for index in indices:
        rows = np.ascontiguousarray(reader.rows(index)).view(ml_dtypes.bfloat16)
        while len(rows):
            part = rows[: _SLAB_ROWS - used]
            slab[used : used + len(part)] = part
            rows, used = rows[len(part) :], used + len(part)
            if used == _SLAB_ROWS:
                yield first, slab
                slab, first, used = np.zeros_like(slab), first + _SLAB_ROWS, 0
    if used:
        yield first, slab


def resident_states(reader: RecordSource, indices: Sequence[int]) -> ResidentStates | None:
    """The records' states on an accelerator with room for them; None elsewhere."""
    device = jax.devices()[0]
    if device.platform == "cpu" or jax.device_count() > 1:
        return None
    room = (device.memory_stats() or {}).get("bytes_limit", 0)
    wanted = int(reader.entries["rows"][indices].sum()) * reader.row_bytes
    return ResidentStates(reader, indices) if wanted <= _SHARE * room else None
