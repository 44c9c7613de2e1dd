"""Hidden states from a target's frame to the drafts that need them, relayed as bytes.

A draft receives each session's positions in order, and only states of its own specification: states for the draft that
had the session before, perhaps of other layers, can still be in transit. When a draft takes over a session, its target
is asked for all states again, and states sent before that are dropped as stray. Where states are missing for another
reason, the draft detects the gap and asks for the session again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from gateway.pools.placement import Placement
from gateway.sessions.session import Session
from gateway.streams.draft import DraftLink
from gateway.streams.features import split_features
from gateway.telemetry.service_metrics import ServiceMetrics
from outrider.wire.features import feature_spans
from outrider.wire.v1 import common_pb2

log = logging.getLogger(__name__)


def relay(
    batch: common_pb2.FeatureBatch,
    sessions: Mapping[int, Session],
    placement: Placement,
    metrics: ServiceMetrics,
) -> None:
    """Relay each block to its session's draft, and record the last position that each session's draft received.

    Raises InvalidRequest for a batch that cannot be decoded; none of it is relayed then.
    """
    owners: list[DraftLink | None] = []  # of each block; stray blocks may precede blocks of the same session
    any_stray = any_closed = False
    for session_id, first, end, spec_id in feature_spans(batch):
        session = sessions.get(session_id)
        stray = session is not None and (
            (session.reopening.active and first > session.features_end == 0)
            or (session.draft is not None and session.draft.feature_spec != spec_id)
        )
        if session is not None and not stray:
            session.features_end = max(session.features_end, end)
        # A session that has just moved to another target keeps its draft, so the blocks decide, not the target.
        owner = session.draft if session is not None and not stray else None
        owners.append(owner if owner is not None and _reads_features(owner) else None)
        any_stray |= stray
        any_closed |= session is None
    receivers = {owner for owner in owners if owner is not None}
    if any_closed:  # an only draft learns from the ends of texts as well
        receivers |= _only_receiver(placement.drafts)
    if not receivers:
        return
    whole = len(receivers) == 1 and not any_stray
    batches = dict.fromkeys(receivers, batch) if whole else split_features(batch, owners)
    for draft, part in batches.items():
        if draft.feed(part):
            metrics.feature_bytes.inc(len(part.rows))
        else:
            log.warning("the draft at %s is too slow for its hidden states; some are dropped", draft.address)


def _reads_features(draft: DraftLink) -> bool:
    return draft.up and bool(draft.feature_spec)


def _only_receiver(drafts: Sequence[DraftLink]) -> set[DraftLink]:
    """The draft that reads hidden states, if there is one alone."""
    readers = {draft for draft in drafts if _reads_features(draft)}
    return readers if len(readers) == 1 else set()
