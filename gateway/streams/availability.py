"""Whether a replica is used, and the reason if it is not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import grpc

from outrider.transport.statuses import RETRY_AFTER


class ReplicaState(StrEnum):
    """A replica as the gateway sees it."""

    READY = "ready"  # its stream is open
    STARTING = "starting"  # it answers, and is not ready yet
    FAILED = "failed"  # it answers that it could not load its model, and tries again
    REFUSED = "refused"  # it does not fit the other services
    DRAINING = "draining"  # it was removed or stops, and finishes sessions that no other replica can take
    AWAITING_WEIGHTS = "awaiting_weights"  # it fits, except that it lacks the weights of an update
    UNREACHABLE = "unreachable"  # nothing answers at its address


@dataclass(frozen=True)
class Availability:
    """A state and its reason, which is empty for a replica that is ready."""

    state: ReplicaState
    reason: str = ""


# A replica in these states is used only after it was restarted, or was sent weights.
UNUSABLE = (ReplicaState.REFUSED, ReplicaState.AWAITING_WEIGHTS)
READY = Availability(ReplicaState.READY)


def after(error: grpc.aio.AioRpcError) -> Availability:
    """The availability of a replica after a call that failed.

    A service that starts up sends UNAVAILABLE with metadata, one that cannot load its model FAILED_PRECONDITION. gRPC
    itself reports UNAVAILABLE and DEADLINE_EXCEEDED where no service answers.
    """
    reason = error.details() or error.code().name
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return Availability(ReplicaState.FAILED, reason)
    if any(key == RETRY_AFTER for key, _ in error.trailing_metadata() or ()):
        return Availability(ReplicaState.STARTING, reason)
    return Availability(ReplicaState.UNREACHABLE, reason)
