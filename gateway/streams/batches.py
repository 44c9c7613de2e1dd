"""Batches of frames, joined and split by session as bytes, without an object per token."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from outrider.speculation.proposal import Proposal
from outrider.wire import codec
from outrider.wire.v1 import common_pb2

Batch = TypeVar("Batch", common_pb2.ProposalBatch, common_pb2.CommitBatch, common_pb2.FeatureBatch)
Key = TypeVar("Key", bound=Hashable)

# Bytes of opens per frame: a service that comes back gets many sessions at once, and frames have a size limit.
_OPEN_BYTES = 16 << 20

_FIELDS: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in kind.DESCRIPTOR.fields)
    for kind in (common_pb2.ProposalBatch, common_pb2.CommitBatch, common_pb2.FeatureBatch)
}


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
    """The proposals of a batch by their session's owner; those without an owner are dropped. Raises InvalidRequest."""
    groups: dict[Key, list[Proposal]] = {}
    for proposal in codec.proposals_from_pb(batch):
        if (key := owner(proposal.session_id)) is not None:
            groups.setdefault(key, []).append(proposal)
    return {key: codec.proposals_to_pb(proposals) for key, proposals in groups.items()}
