"""Outgoing frames: when one is due, and batches, joined and split by session as bytes, without an object per token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np

from outrider.wire.arrays import F32, I32, U32, U64, numbers_of, unpack
from outrider.wire.v1 import common_pb2

Batch = TypeVar("Batch", common_pb2.ProposalBatch, common_pb2.CommitBatch, common_pb2.FeatureBatch)
Key = TypeVar("Key", bound=Hashable)

# Bytes of opens per frame: a service that comes back gets many sessions at once, and frames have a size limit.
_OPEN_BYTES = 16 << 20
_MAX_DELAY = 0.5  # seconds for which messages that are not urgent are gathered

_FIELDS: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in kind.DESCRIPTOR.fields)
    for kind in (common_pb2.ProposalBatch, common_pb2.CommitBatch, common_pb2.FeatureBatch)
}
_COLUMNS = {
    "session_ids": U64, "anchor_lengths": U32, "anchor_hashes": U64, "node_counts": U32, "tokens": U32, "parents": I32,
    "log_scores": F32, "committed_lengths": U32,
}  # fmt: skip
_OF_NODES = frozenset({"tokens", "parents", "log_scores"})  # columns with a row for each draft token


class FrameSignal:
    """Wakes the writer of a stream, at once or after a delay in which more messages may arrive."""

    def __init__(self) -> None:
        self._set = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        """True if a frame is due now."""
        return self._set.is_set()

    def set(self) -> None:
        """A message is waiting."""
        self._set.set()

    def set_later(self) -> None:
        """A message is waiting that is not urgent."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_MAX_DELAY, self.set)

    def clear(self) -> None:
        """The frame is about to be taken."""
        self._set.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wait(self) -> Awaitable[Any]:
        """Completes when a frame is due."""
        return self._set.wait()


def join(batches: Sequence[Batch]) -> Batch | None:
    """One batch with the entries of all, in order. Every field is an array, so its bytes are concatenated."""
    if len(batches) <= 1:
        return batches[0] if batches else None
    fields = _FIELDS[type(batches[0])]
    return type(batches[0])(**{name: b"".join(getattr(batch, name) for batch in batches) for name in fields})


def cut_opens(opens: list[common_pb2.OpenSession]) -> tuple[list[common_pb2.OpenSession], list[common_pb2.OpenSession]]:
    """The sessions to open in the next frame, at least one, and those that do not fit into it."""
    size = 0
    for count, request in enumerate(opens):
        size += request.ByteSize()
        if count and size > _OPEN_BYTES:
            return opens[:count], opens[count:]
    return opens, []


def split_proposals(
    batch: common_pb2.ProposalBatch, owner: Callable[[int], Key | None]
) -> dict[Key, common_pb2.ProposalBatch]:
    """The proposals of a batch, which was checked, by their session's owner; those without an owner are dropped."""
    owners = [owner(session_id) for session_id in numbers_of(batch.session_ids, U64)]
    keys = dict.fromkeys(owners)
    if len(keys) <= 1:
        return {key: batch for key in keys if key is not None}
    places = np.array([list(keys).index(one) for one in owners])
    of_nodes = np.repeat(places, unpack(batch.node_counts, U32))
    columns = {name: unpack(getattr(batch, name), kind) for name, kind in _COLUMNS.items()}
    groups = {}
    for place, key in enumerate(keys):
        if key is not None:
            rows, nodes = places == place, of_nodes == place
            parts = {name: of[nodes if name in _OF_NODES else rows].tobytes() for name, of in columns.items()}
            groups[key] = common_pb2.ProposalBatch(**parts)
    return groups
