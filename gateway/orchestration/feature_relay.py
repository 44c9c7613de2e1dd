"""Hidden states from a target's frame to the drafts that feed on them, unopened.

A draft is fed each session's positions in order, and only what it asked for: rows for another draft that had the
session, which may be of other layers, can still be on their way. When a draft takes a session over, its target is asked
for all of them again; what was still on its way from before is then no beginning, and is left out. Where rows go
missing otherwise, the draft sees the gap and asks for the session again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from gateway.sessions.session import Session
from gateway.streams.draft import DraftLink
from gateway.streams.features import split_features
from gateway.telemetry.metrics import Metrics
from outrider.wire.features import feature_spans
from outrider.wire.v1 import common_pb2

log = logging.getLogger(__name__)


def relay(
    batch: common_pb2.FeatureBatch, sessions: Mapping[int, Session], drafts: Sequence[DraftLink], metrics: Metrics
) -> None:
    """Pass a batch on, each block to the draft of its session, and note how far every session has been fed.

    Raises InvalidRequest for one that cannot be read; nothing of it is passed on then.
    """
    hungry = [draft for draft in drafts if draft.up and draft.feature_spec]
    owners: list[DraftLink | None] = []  # of each block; strays may stand before rows of the same session
    strays = False
    for session_id, first, end, spec_id in feature_spans(batch):
        session = sessions.get(session_id)
        stray = session is not None and (
            (session.lingers and first > session.features_until == 0)
            or (session.draft is not None and session.draft.feature_spec != spec_id)
        )
        if session is not None and not stray:
            session.features_until = max(session.features_until, end)
        owners.append(session.draft if session is not None and not stray and session.draft in hungry else None)
        strays |= stray
    batches = split_features(batch, owners) if len(hungry) > 1 or strays else dict.fromkeys(hungry, batch)
    for draft, part in batches.items():
        if draft.feed(part):
            metrics.feature_bytes.inc(len(part.rows))
        else:
            log.warning("the draft at %s is too slow for its features; some are dropped", draft.address)
