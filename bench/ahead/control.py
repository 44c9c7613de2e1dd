"""What both services of a run do at present, in a file that they read while no session is open.

A mode is changed without a restart, so that modes take turns on the same processes.
"""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple


class Mode(StrEnum):
    """What the draft service does while the target verifies, and what the target does then.

    WAITING   it waits for the target's features; the target waits for its answer
    OWN       it drafts ahead on its own features, and keeps what survives a commit; the target waits for nothing
    TIERS     the same, but it drafts anew when the target's features arrive
    AUTO      the same; the target measures whether waiting pays, as by default
    """

    WAITING = "waiting"
    OWN = "own features"
    TIERS = "two tiers"
    AUTO = "auto"


class Setting(NamedTuple):
    """A mode, the shortest time of a target's step in ms, and the delay of the network, for which it is measured."""

    mode: Mode
    step_ms: float
    delay_ms: float


class Counts(NamedTuple):
    """Of all sessions of a target that have ended: their number, steps behind their first tokens, and those of these
    that had draft tokens."""

    sessions: int = 0
    steps: int = 0
    drafted: int = 0


def write(file: Path, content: Setting | Counts) -> None:
    """Replace the content at once."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(content))
    os.replace(new, file)


def read_counts(file: Path) -> Counts:
    """The counts; zeros before a session has ended."""
    return Counts(*json.loads(file.read_text())) if file.exists() else Counts()


class Watch:
    """Reads the setting when it has changed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen = 0

    def changed(self) -> Setting | None:
        """The setting, if it is another file than the last time."""
        seen = self._file.stat().st_ino
        if seen == self._seen:
            return None
        self._seen = seen
        mode, *numbers = json.loads(self._file.read_text())
        return Setting(Mode(mode), *numbers)
