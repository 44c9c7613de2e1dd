"""Matrices packed for products of a few rows: panels of 32 outputs, each read as one stream (weight.h).

float32, bfloat16 and int8 are laid out here. int4 is quantized and laid out by compiled code (csrc/pack.h).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from services.draft.kernels.cpu import library

_PANEL = 32
_LINE = 64  # bytes
_SLAB = 64 << 20  # bytes
# By bytes of an element: its dtype in JAX, how many of k stand side by side, and the multiple that k is padded to.
_LAYOUTS: dict[int, tuple[Any, int, int]] = {4: (np.float32, 1, 1), 2: (np.uint16, 2, 32), 1: (np.uint8, 4, 64)}
_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Panels:
    """A matrix [inputs, outputs], or several of one shape.

    data:   [..., panels, k / step, 32, step] float32, bfloat16 as uint16, or 8 bits as uint8, their value + 128; int4
            as int8, [..., panels, bytes, 1, 1]
    scales: [..., panels * 32] float32, of 8 bits; activations are quantized to 8 bits for them
    index:  which one of several matrices is meant, int32
    """

    data: jax.Array
    scales: jax.Array | None
    index: jax.Array | None
    inputs: int = field(metadata=_STATIC)
    outputs: int = field(metadata=_STATIC)

    def __getitem__(self, index: jax.Array) -> Panels:
        return Panels(self.data, self.scales, index, self.inputs, self.outputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, or matrices."""
        return (*self.data.shape[:-4], self.inputs, self.outputs)


def product(x: jax.Array, matrix: Panels, dtype: Any = None) -> jax.Array:
    """x @ matrix, summed in float32. x: [..., I] float32 or bfloat16. Returns [..., O] of x's dtype, or float32."""
    result = jax.ShapeDtypeStruct((*x.shape[:-1], matrix.outputs), dtype or x.dtype)
    scales = jnp.zeros(0, jnp.float32) if matrix.scales is None else matrix.scales
    index = jnp.zeros((), jnp.int32) if matrix.index is None else matrix.index.astype(jnp.int32)
    y: jax.Array = library.call("product", result)(x, matrix.data, scales, index)
    return y


def columns(matrix: Panels, index: jax.Array, dtype: Any) -> jax.Array:
    """Columns of a matrix, [..., I] for an index [...]."""
    found = matrix.data[index // _PANEL, :, index % _PANEL]  # [..., k / step, step]
    found = found.reshape(*index.shape, -1)[..., : matrix.inputs]
    if matrix.scales is not None:
        return ((found.astype(jnp.float32) - 128) * matrix.scales[index][..., None]).astype(dtype)
    return jax.lax.bitcast_convert_type(found, jnp.bfloat16) if found.dtype == jnp.uint16 else found


class PanelMaker:
    """Packs matrices side by side on huge pages: a step reads all of them, and would exceed the TLB.

    int4: matrices that are not quantized yet are packed in 4 bits, with a scale and a centre for each 32 inputs
    """

    def __init__(self, *, int4: bool = False) -> None:
        self.int4 = int4
        self._slab = np.empty(0, np.uint8)

    def make(self, matrix: jax.Array, scales: jax.Array | None = None) -> Panels:
        """matrix: [..., I, O] float32, bfloat16 or int8; scales: of int8, [..., O] float32."""
        source = np.asarray(matrix)
        if self.int4 and source.itemsize > 1:
            return self._make_int4(source)
        kind, step, padding = _LAYOUTS[source.itemsize]
        *several, inputs, outputs = source.shape
        source = source.view(np.uint8) ^ 0x80 if source.itemsize == 1 else source.view(kind)
        panels, words = -(-outputs // _PANEL), -(-inputs // padding) * padding // step
        data = self._room((*several, panels, words, _PANEL, step), kind)
        for place in np.ndindex(*several):
            _lay_out(source[place], data[place])
        if scales is not None:
            scales = jnp.pad(scales, [*[(0, 0)] * len(several), (0, panels * _PANEL - outputs)])
        return Panels(jax.dlpack.from_dlpack(data), scales, None, inputs, outputs)

    def _make_int4(self, source: NDArray[Any]) -> Panels:
        *several, inputs, outputs = source.shape
        panels = -(-outputs // _PANEL)
        data = self._room((*several, panels, library.int4_bytes(outputs, inputs) // panels, 1, 1), np.int8)
        for place in np.ndindex(*several):
            rows = np.ascontiguousarray(source[place].T.astype(ml_dtypes.bfloat16, copy=False))
            library.pack_int4(rows.view(np.uint16), data[place])
        return Panels(jax.dlpack.from_dlpack(data), None, None, inputs, outputs)

    def _room(self, shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        if size > len(self._slab):
            slab = mmap.mmap(-1, max(size, _SLAB))
            slab.madvise(mmap.MADV_HUGEPAGE)
            self._slab = np.frombuffer(slab, np.uint8)
        room = self._slab[:size]
        self._slab = self._slab[-(-size // _LINE) * _LINE :]
        typed: NDArray[Any] = room.view(kind).reshape(shape)
        return typed


def _lay_out(source: NDArray[Any], to: NDArray[Any]) -> None:
    """source: [I, O]; to: [panels, words, 32, step]."""
    inputs, outputs = source.shape
    step = to.shape[-1]
    padded = np.zeros((to.shape[1] * step, to.shape[0] * _PANEL), source.dtype)
    padded[:inputs, :outputs] = source
    to[...] = padded.reshape(to.shape[1], step, to.shape[0], _PANEL).transpose(2, 0, 3, 1)
