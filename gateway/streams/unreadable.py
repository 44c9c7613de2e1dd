"""Frames of services that cannot be read: each is counted, and the log tells of the first one of a connection."""

from __future__ import annotations

import logging
from typing import Any

from prometheus_client import Counter

from gateway.streams.link import Link
from outrider.errors import InvalidRequest

log = logging.getLogger(__name__)


class Unreadable:
    """Those of one service's replicas. Lives in one event loop."""

    def __init__(self, counter: Counter, what: str, consequence: str) -> None:
        """counter: by address. what: they hold, and consequence: what becomes of them, for the log."""
        self._counter = counter
        self._what = what
        self._consequence = consequence
        self._told: set[Link[Any, Any]] = set()

    def attach(self, link: Link[Any, Any]) -> None:
        """Count a replica's from 0 on."""
        self._counter.labels(link.address)

    def connected(self, link: Link[Any, Any]) -> None:
        """A connection begins."""
        self._told.discard(link)

    def note(self, link: Link[Any, Any], error: InvalidRequest) -> None:
        """One has come."""
        self._counter.labels(link.address).inc()
        if link not in self._told:
            log.warning(
                "the %s at %s sends %s that cannot be read, and %s: %s; run the same release everywhere",
                link.service, link.address, self._what, self._consequence, error.message,
            )  # fmt: skip
        self._told.add(link)
