"""Stop strings over token borders: what could become one is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until one of the stop strings begins."""

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings."""
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False
        self.matched = ""  # the stop string that was found

    def push(self, text: str) -> str:
        """The text that can be given out. Sets `stopped` once a stop string is complete; what follows is dropped."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, self.matched = min(found, key=lambda pair: pair[0])
            self.stopped, self._held = True, ""
            return text[:place]
        hold = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
