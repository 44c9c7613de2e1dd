"""Arrays of which each device has a part: what is to be done so that all devices have the whole result.

They are met inside of programs that run on several devices (model/spread.py); with one device there are none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "devices"  # of the mesh


class Summed(NamedTuple):
    """Rows of a matrix, [I / devices, O]: the devices' products are to be added."""

    part: Any

    def __getitem__(self, index: Any) -> Summed:  # of experts
        return Summed(self.part[index])


class Joined(NamedTuple):
    """Columns of a matrix, [..., O / devices]: what the devices get from them is to be put side by side."""

    part: Any


def added(x: jax.Array) -> jax.Array:
    """The sum of what the devices have."""
    return lax.psum(x, AXIS)


def side_by_side(x: jax.Array) -> jax.Array:
    """[..., O / devices] of each device as [..., O]."""
    return lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)


def own_part(x: jax.Array, size: int) -> jax.Array:
    """The device's own numbers, [..., size], of what all devices have, [..., devices * size]."""
    return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * size, size, axis=-1)


def own_index(index: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The places of indices in the device's own part of `size`, and which of them lie there."""
    place = index - lax.axis_index(AXIS) * size
    here = (place >= 0) & (place < size)
    return jnp.where(here, place, 0), here
