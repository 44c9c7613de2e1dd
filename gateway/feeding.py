"""Hidden states from a target's frame to the drafts that feed on them, unopened."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from gateway.metrics import Metrics
from gateway.session import Session
from gateway.streams.draft import DraftLink
from gateway.streams.features import split_features
from outrider.wire import codec
from outrider.wire.v1 import common_pb2

log = logging.getLogger(__name__)


def relay(
    batch: common_pb2.FeatureBatch, sessions: Mapping[int, Session], drafts: Sequence[DraftLink], metrics: Metrics
) -> None:
    """Pass a batch on, each block to the draft of its session, and note how far every session has been fed."""
    for session_id, end in codec.feature_ends(batch):
        if (session := sessions.get(session_id)) is not None:
            session.features_until = end
    hungry = [draft for draft in drafts if draft.up and draft.feature_spec]
    if len(hungry) > 1:

        def draft_of(session_id: int) -> DraftLink | None:
            session = sessions.get(session_id)
            return session.draft if session is not None and session.draft in hungry else None

        batches = split_features(batch, draft_of)
    else:
        batches = dict.fromkeys(hungry, batch)
    for draft, part in batches.items():
        if draft.feed(part):
            metrics.feature_bytes.inc(len(part.rows))
        else:
            log.warning("the draft at %s is too slow for its features; some are dropped", draft.address)
