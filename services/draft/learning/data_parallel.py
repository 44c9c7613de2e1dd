"""Data parallelism: the packs of a step's batches are split over a mesh of devices, and their gradients are summed.

Every device holds all parameters and the optimizer's state, and computes the gradients of its packs. One sum over the
mesh makes the gradients of all packs equal on all devices, which then take the same optimizer step.

Batches and steps are those of one device, so that a training may go on with another number of them. Batches of a step
are joined, as many as there are devices; empty packs fill up what does not divide evenly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from services.draft.learning.records.batches import Batch

_AXIS = "data"

_T = TypeVar("_T")


class DataParallel:
    """A mesh of devices that share the batches of a training."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._mesh = Mesh(np.array(devices), (_AXIS,))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return int(self._mesh.size)

    def replicated(self, tree: _T) -> _T:
        """The same arrays on every device."""
        placed: _T = jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))
        return placed

    def summed(self, function: Callable[[Any, Any, Batch], _T]) -> Callable[[Any, Any, Batch], _T]:
        """A function of replicated arguments and a split batch, summed over the devices."""

        def shard(params: Any, target: Any, batch: Batch) -> _T:
            total: _T = jax.lax.psum(function(params, target, batch), _AXIS)
            return total

        whole = PartitionSpec()
        specs = whole, whole, PartitionSpec(_AXIS)
        mapped: Callable[[Any, Any, Batch], _T] = jax.shard_map(
            shard, mesh=self._mesh, in_specs=specs, out_specs=whole, check_vma=False
        )
        return mapped

    def split(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Batches with the same packs, split over the devices."""
        stream = iter(batches)
        while group := list(itertools.islice(stream, self.devices)):
            by_shape: dict[tuple[int, ...], list[Batch]] = {}
            for batch in group:
                by_shape.setdefault((batch.tokens.shape[1], batch.rows.shape[1]), []).append(batch)
            yield from map(self._joined, by_shape.values())

    def _joined(self, batches: Sequence[Batch]) -> Batch:
        """The packs of some batches of one shape. A device gets 1, 2, 4, ... of them, but no more than a batch has, so
        that few programs are compiled.
        """
        each = len(batches[0].rows)
        needed = -(-each * len(batches) // self.devices)
        packs = self.devices * min(1 << (needed - 1).bit_length(), each)
        sharding = NamedSharding(self._mesh, PartitionSpec(_AXIS))

        def join(*arrays: Any) -> jax.Array:
            joined = np.zeros((packs, *arrays[0].shape[1:]), arrays[0].dtype)
            np.concatenate(arrays, out=joined[: each * len(arrays)])
            placed: jax.Array = jax.device_put(joined, sharding)
            return placed

        return Batch(*map(join, *batches))
