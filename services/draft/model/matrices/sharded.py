"""Matrices that are sharded over devices, and the collectives that complete their products.

They occur inside of programs that run on several devices (parallel/mesh.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "devices"  # of the device mesh


class RowSharded(NamedTuple):
    """Rows of a matrix, [I / devices, O]: products of all devices are summed."""

    part: Any

    def __getitem__(self, index: Any) -> RowSharded:  # of experts
        return RowSharded(self.part[index])


class ColumnSharded(NamedTuple):
    """Columns of a matrix, [..., O / devices]: products of all devices are concatenated."""

    part: Any


def all_reduce(x: jax.Array) -> jax.Array:
    """The sum over all devices."""
    total: jax.Array = lax.psum(x, AXIS)
    return total


def all_gather(x: jax.Array) -> jax.Array:
    """[..., O / devices] of each device, concatenated to [..., O]."""
    joined: jax.Array = lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)
    return joined


def local_shard(x: jax.Array, size: int) -> jax.Array:
    """The device's shard, [..., size], of a replicated array, [..., devices * size]."""
    return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * size, size, axis=-1)


def local_index(index: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Indices relative to the device's shard of `size`, and which of them lie in it."""
    place = index - lax.axis_index(AXIS) * size
    here = (place >= 0) & (place < size)
    return jnp.where(here, place, 0), here
