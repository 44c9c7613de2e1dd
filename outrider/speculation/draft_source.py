"""Draft sources by name: where the draft tokens come from that a target verifies.

Requests choose among them, steps report theirs, metrics count by them.
"""

from __future__ import annotations

from enum import IntEnum


class SourceKind(IntEnum):
    """A draft source. Values as in the protocol's DraftSource."""

    DRAFT = 1  # the draft service
    LOOKUP = 2  # prompt lookup
    HEAD = 3  # the local EAGLE head
    QUANTIZED = 4  # the quantized self-draft

    @property
    def label(self) -> str:
        """Its name in requests, reports and metrics."""
        return self.name.lower()

    @property
    def title(self) -> str:
        """Its name in texts."""
        return _TITLES[self]

    @property
    def in_target(self) -> bool:
        """True for those of the target process itself: self-speculation."""
        return self is not SourceKind.DRAFT


_TITLES = {
    SourceKind.DRAFT: "draft service",
    SourceKind.LOOKUP: "prompt lookup",
    SourceKind.HEAD: "local EAGLE head",
    SourceKind.QUANTIZED: "quantized self-draft",
}


ALL_SOURCES = frozenset(SourceKind)
SOURCES_BY_LABEL = {kind.label: kind for kind in SourceKind}
