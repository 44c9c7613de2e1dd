"""Names of Ray actors."""

from __future__ import annotations


def server_name(replica_rank: int, kind: str = "", suffix: str = "") -> str:
    """The actor of a replica. kind: of its model, if it is not the policy."""
    return "_".join(filter(None, ("outrider_server", kind, str(replica_rank)))) + suffix
