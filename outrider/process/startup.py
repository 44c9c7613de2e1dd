"""The start-up of this process: progress, phases, and how long each took, for logs and `outrider bench start`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_START_FIELD = 19  # of /proc/self/stat, behind the command's name: ticks from the system's start to the process's


class Startup:
    """Measures phases that follow one another. A phase that ends several times is the sum of its parts.

    on_progress: called with what is being done, in a few words
    """

    def __init__(self, began: float) -> None:
        """began: when the process began, by `time.monotonic`."""
        self._began = self._last = began
        self._phases: dict[str, float] = {}
        self.on_progress: Callable[[str], None] = lambda _: None

    def report(self, work: str, part: int, parts: int) -> None:
        """Some work has reached a part of several, counted from 0."""
        self.on_progress(f"{work} {100 * part // parts} %")

    def done(self, phase: str) -> None:
        """A phase ends; it began when the one before it ended."""
        now = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now

    def describe(self) -> str:
        """The phases so far, in seconds, with the processor time of the process and of the children that have ended."""
        spent = os.times()
        processor = spent.user + spent.system + spent.children_user + spent.children_system
        parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self._phases.items())
        return f"start-up took {self._last - self._began:.2f} s, {processor:.2f} s of processor time: {parts}"


def _process_start() -> float:
    """When this process began, by `time.monotonic`; now, where the system does not report it."""
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return now
    return now - age


STARTUP = Startup(_process_start())
"""Of this process."""
