"""Stop strings across token borders: a possible beginning of one is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through up to the first stop string.

    stopped, matched: whether a stop string was found, and which
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings."""
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False
        self.matched = ""

    def push(self, text: str) -> str:
        """The text that can be sent. Sets `stopped` once a stop string is complete; the text behind it is dropped."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            index, self.matched = min(found, key=lambda pair: pair[0])
            self.stopped, self._held = True, ""
            return text[:index]
        hold = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        """The text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
