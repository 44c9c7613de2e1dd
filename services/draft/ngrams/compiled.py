"""The compiled n-grams, bound with ctypes. A node takes 32 bytes, and 8 to 16 bytes in the hash table.

`python -m services.draft.ngrams.compiled` compiles them once for an environment.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_double, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider import native
from services.draft.ngrams.base import NO_NAMESPACE, Continuations, NgramOptions, Ngrams

LIBRARY = native.Library(
    "outrider-ngrams",
    Path(__file__).parent / "csrc",
    ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off"),
)


class _Options(ctypes.Structure):
    """Options of csrc/lookup.h."""

    _fields_ = tuple(
        (name, c_int32)
        for name in (
            "by_frequency", "min_window", "max_window", "min_breadth", "max_breadth", "branch_length", "limit"
        )
    )  # fmt: skip


_SIGNATURES: native.Signatures = {
    "new": (c_void_p, (c_uint32, POINTER(_Options))),
    "free": (None, (c_void_p,)),
    "clear": (None, (c_void_p,)),
    "size": (c_int64, (c_void_p,)),
    "bytes": (c_int64, (c_void_p,)),
    "accuracy": (c_double, (c_void_p, c_int32, c_int32)),
    "insert": (None, (c_void_p, c_uint32, c_void_p, c_int64, c_int64, c_int64)),
    "commit": (None, (c_void_p, c_uint32, c_void_p, c_int64, c_int64, c_int32, c_int32)),
    "look_up": (c_int64, (c_void_p, c_uint32, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p)),
    "children": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64)),
}


@functools.cache
def load() -> ctypes.CDLL:
    """The library, compiled at the first call. Raises native.Unavailable."""
    return LIBRARY.loaded("outrider_ngrams_", _SIGNATURES)


class CompiledNgrams(Ngrams):
    """N-grams in C++."""

    def __init__(self, options: NgramOptions) -> None:
        """Reserves addresses for all nodes, but no memory. Raises native.Unavailable, MemoryError."""
        self._library = load()
        limit = options.draft_token_num - 1
        flags = _Options(
            options.match_type == "PROB", options.min_match_window_size, options.max_match_window_size,
            options.min_bfs_breadth, options.max_bfs_breadth, options.branch_length, limit,
        )  # fmt: skip
        self._handle = self._library.outrider_ngrams_new(options.capacity, ctypes.byref(flags))
        if not self._handle:
            raise MemoryError(f"there is no room for {options.capacity} nodes of n-grams")
        native.freed_with(self, self._library.outrider_ngrams_free, self._handle)
        self._tokens = np.empty(limit, np.uint32)
        self._parents = np.empty(limit, np.int32)
        self._scores = np.empty(limit, np.float32)
        self._found = tuple(array.ctypes.data for array in (self._tokens, self._parents, self._scores))

    def __len__(self) -> int:
        return int(self._library.outrider_ngrams_size(self._handle))

    @property
    def nbytes(self) -> int:
        """Memory of the nodes and of their table, in bytes."""
        return int(self._library.outrider_ngrams_bytes(self._handle))

    def insert(
        self, tokens: NDArray[np.uint32], namespace_id: int = NO_NAMESPACE, first: int = 0, stop: int | None = None
    ) -> None:
        """As of Ngrams."""
        tokens = _packed(tokens)
        stop = len(tokens) if stop is None else stop
        self._library.outrider_ngrams_insert(self._handle, namespace_id, tokens.ctypes.data, len(tokens), first, stop)

    def commit(
        self,
        tokens: NDArray[np.uint32],
        fresh: int,
        *,
        noisy: bool,
        namespace_id: int = NO_NAMESPACE,
        keep: bool = True,
    ) -> None:
        """As of Ngrams."""
        tokens = _packed(tokens)
        self._library.outrider_ngrams_commit(
            self._handle, namespace_id, tokens.ctypes.data, len(tokens), fresh, noisy, keep
        )

    def look_up(
        self, context: NDArray[np.uint32], keys: NDArray[np.uint32] | None, namespace_id: int = NO_NAMESPACE
    ) -> Continuations:
        """As of Ngrams."""
        context = _packed(context)
        noise = None if keys is None else _packed(keys)
        count = self._library.outrider_ngrams_look_up(
            self._handle, namespace_id, context.ctypes.data, len(context), None if noise is None else noise.ctypes.data,
            *self._found,
        )  # fmt: skip
        return Continuations(
            self._tokens[:count].tolist(), self._parents[:count].tolist(), self._scores[:count].tolist()
        )

    def accuracy(self, length: int, *, noisy: bool) -> float:
        """As of Ngrams."""
        return float(self._library.outrider_ngrams_accuracy(self._handle, length, noisy))

    def clear(self) -> None:
        """As of Ngrams."""
        self._library.outrider_ngrams_clear(self._handle)

    def children(self, path: NDArray[np.uint32]) -> list[tuple[int, int]] | None:
        """Children at the end of a path as (token, frequency), the most recent first; None without such a path."""
        tokens, frequencies = np.empty(len(self) + 1, np.uint32), np.empty(len(self) + 1, np.uint32)
        path = _packed(path)
        count = self._library.outrider_ngrams_children(
            self._handle, path.ctypes.data, len(path), tokens.ctypes.data, frequencies.ctypes.data, len(tokens)
        )
        if count < 0:
            return None
        return list(zip(tokens[:count].tolist(), frequencies[:count].tolist(), strict=True))


def _packed(array: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(array, np.uint32)


if __name__ == "__main__":
    native.report(LIBRARY, "n-grams", "plain Python")
