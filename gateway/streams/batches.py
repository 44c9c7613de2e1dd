"""Batches as they lie in frames: joined, and split by session, without an object a token."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from outrider.speculation.proposal import Proposal
from outrider.wire import codec
from outrider.wire.v1 import common_pb2

Batch = TypeVar("Batch", common_pb2.ProposalBatch, common_pb2.CommitBatch, common_pb2.FeatureBatch)
Key = TypeVar("Key", bound=Hashable)

# Of sessions that are opened in one frame: those of a service that has come back are many, and frames have a bound.
_OPENED_BYTES = 16 << 20

_FIELDS: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in kind.DESCRIPTOR.fields)
    for kind in (common_pb2.ProposalBatch, common_pb2.CommitBatch, common_pb2.FeatureBatch)
}


def join(batches: Sequence[Batch]) -> Batch | None:
    """One batch with the rows of all, in order. Every field is an array of rows, so the bytes follow one another."""
    if len(batches) <= 1:
        return batches[0] if batches else None
    fields = _FIELDS[type(batches[0])]
    return type(batches[0])(**{name: b"".join(getattr(batch, name) for batch in batches) for name in fields})


def cut_opens(opens: list[common_pb2.OpenSession]) -> tuple[list[common_pb2.OpenSession], list[common_pb2.OpenSession]]:
    """Sessions to open in the next frame, one or more, and those for which there is no room in it."""
    size = 0
    for count, request in enumerate(opens):
        size += request.ByteSize()
        if count and size > _OPENED_BYTES:
            return opens[:count], opens[count:]
    return opens, []


def split_proposals(
    batch: common_pb2.ProposalBatch, owner: Callable[[int], Key | None]
) -> dict[Key, common_pb2.ProposalBatch]:
    """The rows of a batch by who owns their session; rows without an owner are left out. Raises InvalidRequest."""
    groups: dict[Key, list[Proposal]] = {}
    for proposal in codec.proposals_from_pb(batch):
        if (key := owner(proposal.session_id)) is not None:
            groups.setdefault(key, []).append(proposal)
    return {key: codec.proposals_to_pb(rows) for key, rows in groups.items()}
