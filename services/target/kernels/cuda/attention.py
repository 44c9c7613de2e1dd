"""Ragged paged attention with a tree mask on CUDA: the host side of attention_kernels.py.

One launch serves prompt chunks, plain rows and draft nodes of all sessions; a second one folds long contexts that
several programs share. The compiled kernel depends on the model's shapes and on whether all spans are short. If keys
are visited in the order of plain decoding, one kernel serves all batches, so a row has the same bits in each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.target.kernels.cuda import attention_kernels as triton_kernels
from services.target.kernels.cuda.dependent_launch import supports_dependent_launch
from services.target.kernels.cuda.ragged import (
    FOLD_COLUMNS,
    ITEM_COLUMNS,
    TILE_COLUMNS,
    Load,
    Ragged,
    Split,
    Tables,
    words_for,
)
from services.target.step.batch import Batch
from services.target.step.layout import Extent
from services.target.step.prepared import PreparedSpans
from services.target.step.upload import upload

_LOG2E = 1.4426950408889634
# Memory for partial results of long contexts, over all heads; with more, splits get longer or tiles stay whole.
_PARTIAL_BYTES = 64 << 20
# Programs a multiprocessor. They are persistent, so that a captured launch serves any batch.
_PER_PROCESSOR = 2
_FOLDS_AT_ONCE = 16
# Keys of a split if keys are visited in the order of plain decoding, and otherwise.
_ORDERED, _UNORDERED = Split(256, 256), Split(128, 4096)
# Items of a captured step beyond one a tile.
_STATIC_ITEMS = 4096
# Entries of paths in a captured step, for each of its rows.
_STATIC_PATH = 16


@dataclass(frozen=True)
class Tile:
    """The tile of a program. lanes: rows times heads; keys: of a block; stages: blocks in flight.

    Tiles differ in the order of additions, and so in a row's bits. A split starts at the start of a block.
    """

    lanes: int
    keys: int
    split: Split
    warps: int
    stages: int


def pick_tile(key_dim: int, value_dim: int, itemsize: int, *, short: bool = False, ordered: bool = False) -> Tile:
    """The tile of a shape. It is tall enough that verifying 16 nodes reads the keys once for 4 heads a group.

    short: for batches of short spans (see Extent), where a tile mostly waits for its keys; ordered: see TritonAttention
    """
    if itemsize > 2:  # exact products do not use the tensor cores; 16 of the widest keys take 70 KiB
        lanes, keys, warps, stages = (16, 32, 4, 2) if max(key_dim, value_dim) <= 256 else (16, 16, 4, 1)
    elif max(key_dim, value_dim) <= 128:
        lanes, keys, warps, stages = (16, 128, 4, 3) if short else (64, 64, 4, 3)
    elif max(key_dim, value_dim) <= 256:
        lanes, keys, warps, stages = 64, 32, 8, 2
    else:
        lanes, keys, warps, stages = 16, 32, 4, 2
    return Tile(lanes, keys, _ORDERED if ordered else _UNORDERED, warps, stages)


@dataclass(frozen=True)
class Kind:
    """The properties that layers with common tables have in common."""

    height: int
    window: int | None
    split: Split
    programs: int  # per item: key heads times blocks of heads
    partial_rows: int


@dataclass(frozen=True)
class DeviceTables:
    """`ragged.Tables` of a kind on the device. count: [1] int32, items."""

    tiles: Tensor
    items: Tensor
    folds: Tensor
    count: Tensor


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@lru_cache
def _workspace(rows: int, heads: int, value_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for partial results, shared by all layers."""
    acc = torch.empty(rows, heads, value_dim, dtype=torch.float32, device=device)
    return acc, torch.empty(rows, heads, 2, dtype=torch.float32, device=device)


class TritonAttention:
    """Attention of one batch; call it once a layer."""

    knows_extents = True
    """Of a planner: batches of short spans have tiles of their own, and plain batches skip the tree mask."""
    takes_prepared_spans = True
    """Of a planner: the device may move spans and choose their trees after the tables were made."""

    def __init__(self, batch: Batch, tile: Tile | None = None, *, ordered: bool = False) -> None:
        """tile: for measurements; by default chosen by shape. ordered: visit keys in the order of plain decoding."""
        self.ordered = ordered
        self.extent = Extent.LONG if ordered else batch.layout.extent
        self._batch = batch
        self._tile = tile
        self._ragged: Ragged | None = None
        self._pages = self._words = self._paths = torch.empty(0)
        self._tables: dict[Kind, tuple[DeviceTables, bool]] = {}

    def __call__(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """As `reference.paged_attention`. k_scale, v_scale: factors of the numbers in fp8 pools."""
        layout = Layout.of(q, k_pool, v_pool, self._tile, short=self.extent < Extent.LONG, ordered=self.ordered)
        tables, partial = self._tables_of(layout.kind(window), q.device)
        assert self._ragged is not None
        return launch(
            layout, q, k_pool, v_pool, self._batch.positions, tables, self._pages, self._words,
            self._paths, partial=partial, tree=len(self._ragged.words) > 0, words_a_node=self._ragged.node_words,
            ordered=len(self._ragged.paths) > 0,
            scaling=scaling, window=window, softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of layers computed so far."""
        return list(self._tables)

    def _tables_of(self, kind: Kind, device: torch.device) -> tuple[DeviceTables, bool]:
        if kind not in self._tables:
            shared: list[NDArray[np.int32]] = []
            if self._ragged is None:
                self._ragged = Ragged(self._batch.layout, self._batch.rows.positions, ordered=self.ordered)
                shared = [self._ragged.pages, self._ragged.words, self._ragged.paths]
            host = tabulate(self._ragged, kind, device)
            count = np.array([len(host.items)], np.int32)
            tensors = upload([host.tiles, host.items, host.folds, count, *shared], device)
            if shared:
                self._pages, self._words, self._paths = tensors[4:]
            if (prepared := self._batch.prepared) is not None:
                prepared.shift(tensors[0][:, 0], tensors[0][:, 3:5])
                if shared:
                    prepared.words(self._words)
            self._tables[kind] = DeviceTables(*tensors[:4]), host.partial_rows > 0
        return self._tables[kind]


class StaticAttention:
    """Attention for captured steps: every batch writes its tables to the same addresses."""

    def __init__(
        self,
        rows: int,
        pages: int,
        kinds: Sequence[Kind],
        device: torch.device,
        *,
        ordered: bool = False,
        extent: Extent = Extent.LONG,
    ) -> None:
        """rows: of a step, padding included; pages: most pages of a batch; kinds: of the model's layers.

        ordered: as in TritonAttention; extent: of the batches that it serves
        """
        self._ordered, self._extent = ordered, extent
        self._node_words = words_for(rows)
        self._rows, self._kinds, self._device = rows, kinds, device
        tables = [[rows, TILE_COLUMNS], [rows + _STATIC_ITEMS, ITEM_COLUMNS], [rows, FOLD_COLUMNS], [1]]
        shapes = [shape for _ in kinds for shape in tables] + [
            [rows, self._node_words],
            [rows * _STATIC_PATH if ordered else 1],
            [pages],  # the largest is last, because only its used part is transferred; see DeviceArrays
        ]
        self.limits = [np.zeros(shape, np.int32) for shape in shapes]
        self._tables: dict[Kind, DeviceTables] = {}
        self._words = self._pages = self._paths = self._positions = torch.empty(0)

    def arrays(self, batch: Batch) -> list[NDArray[np.int32]] | None:
        """The tables of a padded batch, in the order of the limits; None if it has more than fits."""
        ragged = Ragged(batch.layout, batch.rows.positions, self._node_words, ordered=self._ordered)
        if len(ragged.paths) > len(self.limits[-2]) or len(ragged.pages) > len(self.limits[-1]):
            return None
        arrays: list[NDArray[np.int32]] = []
        for kind in self._kinds:
            host = tabulate(ragged, kind, self._device, _STATIC_ITEMS)
            arrays += [host.tiles, host.items, host.folds, np.array([len(host.items)], np.int32)]
        return [*arrays, ragged.words, ragged.paths, ragged.pages]

    def attach(self, tensors: Sequence[Tensor], positions: Tensor) -> None:
        """Set the device tensors that `arrays` are copied to, and the rows' positions."""
        self._tables = {kind: DeviceTables(*tensors[4 * i : 4 * i + 4]) for i, kind in enumerate(self._kinds)}
        self._words, self._paths, self._pages = tensors[-3:]
        self._positions = positions

    def follow(self, prepared: PreparedSpans) -> None:
        """Let the tables follow prepared spans, after `arrays` were copied."""
        for tables in self._tables.values():
            prepared.shift(tables.tiles[:, 0], tables.tiles[:, 3:5])
        prepared.words(self._words)

    def __call__(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """As TritonAttention."""
        layout = Layout.of(q, k_pool, v_pool, short=self._extent < Extent.LONG, ordered=self._ordered)
        return launch(
            layout, q, k_pool, v_pool, self._positions, self._tables[layout.kind(window)], self._pages, self._words,
            self._paths, partial=True, tree=self._extent > Extent.PLAIN, words_a_node=self._node_words,
            ordered=self._ordered,
            scaling=scaling, window=window, softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip


def tabulate(ragged: Ragged, kind: Kind, device: torch.device, items: int = 1 << 20) -> Tables:
    """The tables of a kind. items: most items in addition to one a tile."""
    load = Load(processors(device) * _PER_PROCESSOR, kind.partial_rows, items)
    return ragged.tables(kind.height, kind.window, kind.split, load, kind.programs)


@dataclass(frozen=True)
class Layout:
    """Shapes of a call and its tile. A group's heads are divided into `blocks` of `heads`."""

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    page_size: int
    tile: Tile
    heads: int
    blocks: int

    @classmethod
    def of(
        cls, q: Tensor, k_pool: Tensor, v_pool: Tensor, tile: Tile | None = None, *, short: bool = False,
        ordered: bool = False,
    ) -> Layout:  # fmt: skip
        """q: [T, heads, D]; pools: [pages, page_size, kv_heads, D or Dv]. short, ordered: as of `pick_tile`."""
        tile = tile or pick_tile(q.shape[2], v_pool.shape[3], q.element_size(), short=short, ordered=ordered)
        return _layout(q.shape[1], k_pool.shape[2], q.shape[2], v_pool.shape[3], k_pool.shape[1], tile)

    @property
    def height(self) -> int:
        """Rows a tile."""
        return self.tile.lanes // self.heads

    def kind(self, window: int | None) -> Kind:
        """The kind of a call, which decides its tables."""
        row_bytes = self.kv_heads * self.group * (self.value_dim + 2) * 4
        partial_rows = max(_PARTIAL_BYTES // row_bytes, 1)
        return Kind(self.height, window, self.tile.split, self.kv_heads * self.blocks, partial_rows)


@lru_cache
def _layout(heads: int, kv_heads: int, key_dim: int, value_dim: int, page_size: int, tile: Tile) -> Layout:
    group = heads // kv_heads
    blocks = -(-group // tile.lanes)
    return Layout(kv_heads, group, key_dim, value_dim, page_size, tile, -(-group // blocks), blocks)


def launch(
    layout: Layout,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    positions: Tensor,
    tables: DeviceTables,
    pages: Tensor,
    words: Tensor,
    paths: Tensor,
    *,
    partial: bool,
    tree: bool,
    words_a_node: int,
    ordered: bool,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    k_scale: float,
    v_scale: float,
) -> Tensor:
    """Launch the kernels. partial: some tile is shared by several programs. Returns [T, heads, Dv]."""
    assert q.stride(2) == k_pool.stride(3) == v_pool.stride(3) == 1, "a head's numbers lie together"
    tile, key_dim, value_dim = layout.tile, layout.key_dim, layout.value_dim
    out = q.new_empty(q.shape[0], q.shape[1], value_dim)
    kind = layout.kind(window)
    acc, ml = _workspace(kind.partial_rows, q.shape[1], value_dim, q.device)
    wide_keys = max(16, 1 << (key_dim.bit_length() - 1))
    rest = max(key_dim - wide_keys, 0)
    scale = scaling * k_scale * _LOG2E
    cap = 0.0
    if softcap is not None:  # cap tanh(s / cap) = cap (1 - 2 / (exp(2 s / cap) + 1))
        scale, cap = 2.0 * scale / softcap, softcap * _LOG2E
    padded_value = max(16, 1 << (value_dim - 1).bit_length())
    programs = processors(q.device) * _PER_PROCESSOR
    chain = supports_dependent_launch(q.device)
    triton_kernels.attend[(programs,)](
        q, k_pool, v_pool, out, acc, ml, positions, tables.tiles, tables.items, tables.count, pages, words,
        paths, q if sinks is None else sinks,
        scale, cap, v_scale, window or 0, words_a_node,
        q.stride(0), q.stride(1), *k_pool.stride()[:3], *v_pool.stride()[:3], out.stride(0), out.stride(1),
        KV_HEADS=layout.kv_heads, GROUP=layout.group, HEADS=layout.heads, BLOCKS=layout.blocks,
        D1=wide_keys, D2=max(16, 1 << (rest - 1).bit_length()) if rest else 0, D=key_dim,
        DV=value_dim, DV_PAD=padded_value, PAGE=layout.page_size, M=tile.lanes, N=tile.keys,
        TREE=tree, WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        WIDE=interpreted() and q.dtype == torch.bfloat16, ORDERED=ordered, EACH=tile.split.fixed, CHAINED=chain,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, launch_pdl=chain,
    )  # fmt: skip
    if partial:
        triton_kernels.fold[(q.shape[0], q.shape[1])](
            out, acc, ml, tables.folds, q if sinks is None else sinks, v_scale, out.stride(0), out.stride(1),
            HEAD_COUNT=q.shape[1], DV=value_dim, DV_PAD=padded_value, SINKS=sinks is not None,
            AT_ONCE=_FOLDS_AT_ONCE, CHAINED=chain, num_warps=1 if value_dim <= 128 else 4, enable_fp_fusion=False,
            launch_pdl=chain,
        )  # fmt: skip
    return out


def interpreted() -> bool:
    """True if Triton's interpreter replaces the GPU; it cannot multiply bfloat16."""
    return os.environ.get("TRITON_INTERPRET") == "1"
