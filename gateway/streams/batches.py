"""Batches as they lie in frames: joined, split by session and read, without an object a token."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from outrider.errors import InvalidRequest
from outrider.speculation.proposal import Proposal
from outrider.wire import codec
from outrider.wire.codec import U8, U32, U64, unpack
from outrider.wire.v1 import common_pb2

Batch = TypeVar("Batch", common_pb2.ProposalBatch, common_pb2.CommitBatch)
Key = TypeVar("Key", bound=Hashable)

_PROPOSAL_FIELDS = tuple(field.name for field in common_pb2.ProposalBatch.DESCRIPTOR.fields)
_COMMIT_FIELDS = tuple(field.name for field in common_pb2.CommitBatch.DESCRIPTOR.fields)


def join(batches: Sequence[Batch]) -> Batch | None:
    """One batch with the rows of all, in order. Every field is an array of rows, so the bytes follow one another."""
    if len(batches) <= 1:
        return batches[0] if batches else None
    fields = _PROPOSAL_FIELDS if isinstance(batches[0], common_pb2.ProposalBatch) else _COMMIT_FIELDS
    return type(batches[0])(**{name: b"".join(getattr(batch, name) for batch in batches) for name in fields})


def split_proposals(
    batch: common_pb2.ProposalBatch, owner: Callable[[int], Key | None]
) -> dict[Key, common_pb2.ProposalBatch]:
    """The rows of a batch by who owns their session; rows without an owner are left out. Raises InvalidRequest."""
    groups: dict[Key, list[Proposal]] = {}
    for proposal in codec.proposals_from_pb(batch):
        if (key := owner(proposal.session_id)) is not None:
            groups.setdefault(key, []).append(proposal)
    return {key: codec.proposals_to_pb(rows) for key, rows in groups.items()}


def commit_rows(batch: common_pb2.CommitBatch) -> Iterator[tuple[int, int, list[int], int, int, int]]:
    """Each commit as (session id, base length, tokens, verified, accepted, finish reason). Raises InvalidRequest."""
    ids = unpack(batch.session_ids, U64)
    size = len(ids)
    tokens: list[int] = unpack(batch.tokens, U32).tolist()
    ends = np.cumsum(unpack(batch.token_counts, U32, size), dtype=np.int64).tolist()
    if (ends[-1] if ends else 0) != len(tokens):
        raise InvalidRequest(f"the counts of a frame of commits do not add up to its {len(tokens)} tokens")
    columns = zip(
        ids.tolist(),
        unpack(batch.base_lengths, U32, size).tolist(),
        [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)],
        unpack(batch.verified_counts, U32, size).tolist(),
        unpack(batch.accepted_counts, U32, size).tolist(),
        unpack(batch.finish_reasons, U8, size).tolist(),
        strict=True,
    )
    return iter(columns)
