"""Frames and bytes of the streams to the services, counted where they are sent and received."""

from __future__ import annotations

from typing import Literal, NamedTuple

Direction = Literal["sent", "received"]


class Lane(NamedTuple):
    """What a count is about. stream: target, draft, or features for the hidden states in frames of both."""

    stream: str
    direction: Direction
    transport: str


class Count:
    """Frames and their bytes."""

    __slots__ = ("bytes", "frames")

    def __init__(self) -> None:
        self.frames = 0
        self.bytes = 0

    def add(self, size: int) -> None:
        """Count a frame of this many bytes."""
        self.frames += 1
        self.bytes += size


class Traffic:
    """Counts of all streams of a gateway process. Lives in one event loop."""

    def __init__(self) -> None:
        self.counts: dict[Lane, Count] = {}

    def count(self, stream: str, direction: Direction, transport: str) -> Count:
        """The count of a lane; the caller may keep it."""
        return self.counts.setdefault(Lane(stream, direction, transport), Count())
