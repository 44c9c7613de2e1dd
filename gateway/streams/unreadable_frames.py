"""Frames of services that cannot be decoded: all are counted, and the first of a connection is logged."""

from __future__ import annotations

import logging
from typing import Any

from prometheus_client import Counter

from gateway.streams.link import Link
from outrider.errors import InvalidRequest

log = logging.getLogger(__name__)


class UnreadableFrames:
    """The unreadable frames of one service's replicas. Lives in one event loop."""

    def __init__(self, counter: Counter, content: str, consequence: str) -> None:
        """counter: by address. content, consequence: what such frames hold and what becomes of it, for the log."""
        self._counter = counter
        self._content = content
        self._consequence = consequence
        self._logged: set[Link[Any, Any]] = set()

    def attach(self, link: Link[Any, Any]) -> None:
        """Start a replica's counter at 0."""
        self._counter.labels(link.address)

    def detach(self, link: Link[Any, Any]) -> None:
        """Drop a replica that has left its pool."""
        self._counter.remove(link.address)
        self._logged.discard(link)

    def connected(self, link: Link[Any, Any]) -> None:
        """A connection begins."""
        self._logged.discard(link)

    def add(self, link: Link[Any, Any], error: InvalidRequest) -> None:
        """Count a frame."""
        self._counter.labels(link.address).inc()
        if link not in self._logged:
            log.warning(
                "the %s at %s sends %s that cannot be read, and %s: %s; run the same release everywhere",
                link.service, link.address, self._content, self._consequence, error.message,
            )  # fmt: skip
        self._logged.add(link)
