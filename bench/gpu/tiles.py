"""The attention kernel alone on several batch shapes, with the selected tile and with alternatives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu.cases import PAGE, VERIFIED, sessions
from bench.gpu.clocks import Clocks
from services.target.kernels.cuda.attention import Tile, TritonAttention, pick_tile
from services.target.kernels.cuda.ragged import Split
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape, token_bytes
from services.target.step.batch import build
from services.target.step.layout import SHORT

_SPLITS, _SHORTER, _FIXED = Split(128, 4096), Split(128, 2048), Split(256, 256)
_OTHERS_SHORT = (
    Tile(16, 128, _SPLITS, 4, 2), Tile(16, 64, _SPLITS, 4, 3), Tile(16, 64, _SPLITS, 4, 4),
    Tile(16, 128, _FIXED, 4, 3),
)  # fmt: skip
_OTHERS_TALL = (
    Tile(64, 64, _SPLITS, 4, 4), Tile(64, 64, _SPLITS, 8, 3), Tile(64, 32, _SPLITS, 4, 3), Tile(64, 32, _SPLITS, 4, 4),
    Tile(32, 64, _SPLITS, 4, 3), Tile(64, 64, _SHORTER, 4, 3), Tile(64, 64, _FIXED, 4, 3),
)  # fmt: skip
# Sessions, tokens of each in the step, tokens of context.
_CELLS = (
    (1, 1, 1024), (1, 1, 8192), (1, 1, 32768), (16, 1, 1000), (16, 1, 8192), (1, VERIFIED, 1024), (1, VERIFIED, 8192),
    (4, VERIFIED, 1024), (16, VERIFIED, 1024), (16, VERIFIED, 8192), (1, 2048, 2048),
)  # fmt: skip
_LAYERS = 12  # their keys and values exceed the device's caches


def measure_tiles(
    shape: LayerShape,
    heads: int,
    dtype: torch.dtype,
    clocks: Clocks,
    bandwidth: float,
    note_failure: Callable[[str], contextlib.AbstractContextManager[None]],
) -> Iterator[dict[str, Any]]:
    """A row of the report for each shape and tile.

    heads: query heads; bandwidth: in bytes/s; note_failure: a context that reports a tile that does not compile
    """
    head, device = shape.key_dim, clocks.device
    short, tall = (pick_tile(head, head, dtype.itemsize, short=short) for short in (True, False))
    pages = -(-16 * (8192 + 64) // PAGE) + 64
    cache = KVCache([shape] * _LAYERS, pages, PAGE, dtype, device)
    for pool in (*cache.keys, *cache.values):
        pool.normal_()
    for (count, rows, context), tile in _tried():
        picked = tile or (short if rows <= SHORT else tall)
        split = f"{picked.split.least}" + (f" to {picked.split.most}" if picked.split.least < picked.split.most else "")
        name = f"{picked.lanes}x{picked.keys}, split {split}, {picked.warps} warps, {picked.stages} stages"
        with note_failure(name):
            batch = build(sessions(count, context, rows, cache), device)
            q = torch.randn(len(batch), heads, head, dtype=dtype, device=device)
            kernel = TritonAttention(batch, tile)

            def once(kernel: TritonAttention = kernel, q: torch.Tensor = q) -> None:
                for keys, values in zip(cache.keys, cache.values, strict=True):
                    kernel(q, keys, values, scaling=head**-0.5)

            us = 1e6 * clocks.device_alone(once) / _LAYERS
            floor = 1e6 * count * context * token_bytes([shape], dtype) / bandwidth
            named = name + ("" if tile else " (picked)")
            yield {
                "sessions": count, "rows": rows, "context": context, "tile": named,
                "us": us, "floor us": floor, "of floor": floor / us,
            }  # fmt: skip


def _tried() -> Iterator[tuple[tuple[int, int, int], Tile | None]]:
    """Cells and tiles; None, the first tile of each cell, is the selected one."""
    for cell in _CELLS:
        for tile in (None, *(_OTHERS_SHORT if cell[1] <= SHORT else _OTHERS_TALL)):
            yield cell, tile
