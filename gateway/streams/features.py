"""Hidden states between a target and a draft, relayed as bytes.

A slow draft has a backlog. When it is full, the newest states are dropped, and the draft detects the gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.streams.frames import Key, join
from outrider.serving.features import BACKLOG_BYTES, FRAME_BYTES, FeatureBlock
from outrider.wire.features import feature_spans, features_from_pb, features_to_pb
from outrider.wire.v1 import common_pb2

FUSION_TIMEOUT = 120.0  # seconds to transfer a fusion layer


@dataclass(frozen=True)
class Features:
    """The hidden states that a draft needs of targets. fusion: its fusion layer, in parts."""

    spec: common_pb2.FeatureSpec
    fusion: Sequence[bytes]


class Backlog:
    """Batches that wait for a frame. Each arrived in one frame, so it fits into one; small ones share a frame."""

    def __init__(self) -> None:
        self._batches: deque[common_pb2.FeatureBatch] = deque()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: common_pb2.FeatureBatch) -> bool:
        """Add a batch. False if the backlog is full."""
        if self.nbytes + len(batch.rows) > BACKLOG_BYTES:
            return False
        self._batches.append(batch)
        self.nbytes += len(batch.rows)
        return True

    def drop(self, session_id: int) -> None:
        """Drop the waiting states of a session."""
        kept: deque[common_pb2.FeatureBatch] = deque()
        for batch in self._batches:
            owners = [None if owner == session_id else 0 for owner in _sessions(batch)]
            kept.extend(split_features(batch, owners).values() if None in owners else [batch])
        self._batches, self.nbytes = kept, sum(len(batch.rows) for batch in kept)

    def take(self) -> common_pb2.FeatureBatch | None:
        """The next batches, as one."""
        taken: list[common_pb2.FeatureBatch] = []
        size = 0
        while self._batches and (not taken or size + len(self._batches[0].rows) <= FRAME_BYTES):
            taken.append(self._batches.popleft())
            size += len(taken[-1].rows)
        self.nbytes -= size
        return join(taken)


def _sessions(batch: common_pb2.FeatureBatch) -> list[int]:
    """The session of each block."""
    return [session_id for session_id, *_ in feature_spans(batch)]


def split_features(batch: common_pb2.FeatureBatch, owners: Sequence[Key | None]) -> dict[Key, common_pb2.FeatureBatch]:
    """The blocks of a batch by their owners; those without one are dropped. Raises InvalidRequest."""
    groups: dict[Key, list[FeatureBlock]] = {}
    for block, owner in zip(features_from_pb(batch), owners, strict=True):
        if owner is not None:
            groups.setdefault(owner, []).append(block)
    return {owner: features_to_pb(blocks) for owner, blocks in groups.items()}
