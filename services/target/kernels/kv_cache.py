"""The paged KV cache: one pool of keys and one of values a layer (pools.py), written and moved by slot.

Which session owns which page is not known here; see outrider.paging.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.paging.allocator import NULL_PAGE
from services.target.kernels.pools import LayerShape, States, indexable, stored


class KVCache:
    """Pools of all layers; layers may differ in shape."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: States | None = None,
    ) -> None:
        """pages: usable pages, NULL_PAGE not counted. dtype: of the pools, see `pools.pick_cache_dtype`.

        states: hidden states stored for every token, which the local EAGLE head reads
        """
        self.pages, self.page_size = pages, page_size

        def pool(kv_heads: int, dim: int) -> Tensor:
            # The system allocates memory as pages are first used. NULL_PAGE must be finite, because padding reads it.
            rows = torch.empty(pages + 1, page_size, kv_heads, dim, dtype=dtype, device=device)
            indexable(rows)[NULL_PAGE].zero_()
            return rows

        self.dtype = dtype
        self.on_move: Callable[[Tensor], None] | None = None  # called with all moves, [2, ...], before they are made
        self.keys = [pool(shape.kv_heads, shape.key_dim) for shape in shapes]
        self.values = [
            keys[..., : shape.value_dim] if shape.shared else pool(shape.kv_heads, shape.value_dim)
            for shape, keys in zip(shapes, self.keys, strict=True)
        ]
        own_values = [values for shape, values in zip(shapes, self.values, strict=True) if not shape.shared]
        self._shared = [shape.shared for shape in shapes]
        self.states: Tensor | None = None
        if states is not None:  # zeros, because a head may read rows that no step has written for it
            self.states = torch.zeros(pages + 1, page_size, states.width, dtype=states.dtype, device=device)
        self._pools = [*self.keys, *own_values, *([] if self.states is None else [self.states])]
        self._on_device: Any = None
        self._mover: Any = None
        if device.type == "cpu":
            from services.target.kernels.cpu import library
            from services.target.kernels.cpu.attention.row_moves import Mover

            self._mover = Mover(self._pools) if library.available() else None
        if device.type == "cuda" and importlib.util.find_spec("triton"):
            from services.target.kernels.cuda import cache as triton_cache

            self._on_device = triton_cache
            self._mover = triton_cache.Mover(self._pools)

    def release(self) -> int:
        """On a CPU: return the pools' memory to the system, and forget all rows. Returns its size, in bytes.

        Addresses stay, and memory comes back, zeroed, as rows are written: compiled programs need not know.
        """
        return sum(given_back(pool) for pool in self._pools)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows. slots: [T] int64; keys: [T, kv_heads, key_dim]; values: [T, kv_heads, value_dim]."""
        if self._on_device:
            pool, values = (self.keys[layer], keys) if self._shared[layer] else (self.values[layer], values)
            self._on_device.write(slots, keys, values, self.keys[layer], pool)  # shared: writes the keys twice
            return
        self._write(self.keys[layer], slots, keys)
        if not self._shared[layer]:
            self._write(self.values[layer], slots, values)

    def _write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        indexable(pool).flatten(0, 1).index_copy_(0, slots, indexable(stored(rows, self.dtype)))

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy rows between slots in every layer. Both [n] int64. No destination may be a later source."""
        if self.on_move is not None:
            self.on_move(torch.stack([sources, destinations]))
        self._move(sources, destinations)

    def move_paths(self, moves: Tensor) -> None:
        """Copy rows of many sessions between slots in every layer. moves: [2, S, D] int64, sources and destinations.

        Equal slots, such as 0 and 0, move nothing. A session's moves are made in order; no destination of one session
        is a source of another.
        """
        if self.on_move is not None:
            self.on_move(moves)
        self._move_paths(moves)

    def repeat(self, moves: Tensor) -> None:
        """Make moves that were made in another cache of the same pages, as `on_move` got them."""
        if moves.ndim == 2:
            self._move(*moves)
        else:
            self._move_paths(moves)

    def _move(self, sources: Tensor, destinations: Tensor) -> None:
        if self._mover is not None:
            self._mover.move(sources, destinations)
            return
        for pool in self._pools:
            rows = indexable(pool).flatten(0, 1)
            rows.index_copy_(0, destinations, rows.index_select(0, sources))

    def _move_paths(self, moves: Tensor) -> None:
        if self._on_device:
            self._mover.move_paths(moves)
        else:
            self._move(*moves.flatten(1))


def given_back(tensor: Tensor) -> int:
    """Let the system take the whole memory pages of a tensor on the host, which are zero then. Returns their size."""
    size = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // size) * size
    stop = (tensor.data_ptr() + tensor.nbytes) // size * size
    if stop <= start:
        return 0
    if ctypes.CDLL(None, use_errno=True).madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED
    ):
        raise OSError(ctypes.get_errno(), "the system does not take memory back")
    return stop - start
