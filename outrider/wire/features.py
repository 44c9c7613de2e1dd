"""Feature specifications and blocks of hidden states, between domain types and protobuf messages.

Functions raise InvalidRequest for messages whose arrays do not fit together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import add

import numpy as np

from outrider.errors import InvalidRequest
from outrider.serving.features import FeatureBlock, FeatureFormat, FeatureSpec
from outrider.wire.arrays import U8, U32, U64, numbers_of, pack, split, unpack
from outrider.wire.v1 import common_pb2


def feature_spec_to_pb(spec: FeatureSpec, fusion: bytes) -> common_pb2.FeatureSpec:
    """A FeatureSpec message. fusion: the safetensors file of the fusion, or empty."""
    return common_pb2.FeatureSpec(
        spec_id=spec.id(fusion),
        layers=spec.layers,
        final=spec.final,
        format=common_pb2.FeatureFormat.Name(int(spec.format)),
        norm_epsilon=spec.norm_epsilon,
    )


def feature_spec_from_pb(message: common_pb2.FeatureSpec) -> FeatureSpec:
    """The specification in a message. Raises InvalidRequest for an unknown format."""
    try:
        layout = FeatureFormat(message.format)
    except ValueError:
        raise InvalidRequest(f"feature format {message.format} is unknown") from None
    return FeatureSpec(tuple(message.layers), message.final, layout, message.norm_epsilon)


def features_to_pb(blocks: Sequence[FeatureBlock]) -> common_pb2.FeatureBatch:
    """A FeatureBatch message."""
    return common_pb2.FeatureBatch(
        session_ids=pack((b.session_id for b in blocks), U64),
        first_positions=pack((b.first for b in blocks), U32),
        row_counts=pack((len(b.rows) for b in blocks), U32),
        block_bytes=pack((b.rows.nbytes for b in blocks), U32),
        rows=b"".join(np.ascontiguousarray(b.rows).data for b in blocks),
        spec_ids=pack((b.spec_id for b in blocks), U64),
    )


def features_from_pb(message: common_pb2.FeatureBatch) -> list[FeatureBlock]:
    """The blocks in a message, as views of its bytes."""
    ids = numbers_of(message.session_ids, U64)
    rows = unpack(message.rows, U8)
    columns = (
        ids,
        numbers_of(message.first_positions, U32, len(ids)),
        numbers_of(message.row_counts, U32, len(ids)),
        split(numbers_of(message.block_bytes, U32, len(ids)), len(rows)),
        numbers_of(message.spec_ids, U64, len(ids)),
    )
    blocks = []
    for session_id, first, count, span, spec_id in zip(*columns, strict=True):
        size = span.stop - span.start
        _check_block(size, count)
        blocks.append(FeatureBlock(session_id, first, rows[span].reshape(count, size // count), spec_id))
    return blocks


def _check_block(size: int, count: int) -> None:
    if not count or size % count:
        raise InvalidRequest(f"a block of {size} bytes does not hold {count} rows")


def feature_spans(batch: common_pb2.FeatureBatch) -> Iterator[tuple[int, int, int, int]]:
    """Each block as (session id, first position, position after the last row, spec_id), for the gateway.

    Does not read rows. Raises InvalidRequest as features_from_pb does.
    """
    ids = numbers_of(batch.session_ids, U64)
    first = numbers_of(batch.first_positions, U32, len(ids))
    counts = numbers_of(batch.row_counts, U32, len(ids))
    sizes = numbers_of(batch.block_bytes, U32, len(ids))
    split(sizes, len(batch.rows))
    for size, count in zip(sizes, counts, strict=True):
        _check_block(size, count)
    return zip(ids, first, map(add, first, counts), numbers_of(batch.spec_ids, U64, len(ids)), strict=True)
