"""Spans and marks of one service's engine: in memory while it works, in files while it is idle.

All times are of the monotonic clock, which the processes of one machine share. A file is written when the loop audits
an idle engine, half a second after its last message, so that writing disturbs nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.serving.loop import Engine
from outrider.serving.messages import StepOutput
from outrider.speculation.proposal import Commit, Proposal

Rows = Mapping[str, NDArray[np.float64]]
# Columns of the rows of each kind; times in seconds.
COLUMNS = {
    "step": 2,  # start and end of an engine's step
    "launch": 5,  # start and end on the host, and on the device; draft tokens
    "read": 2,  # start and end of waiting for samples
    "run": 3,  # start and end of a program of the draft, and what its dispatch takes of that
    "commits": 2,  # time and key
    "proposals": 2,  # time and key
}
_KEY_BITS = (1 << 52) - 1  # a float holds that many exactly


class Recorder:
    """Collects rows of one process. flush: called before rows are written, to complete them."""

    def __init__(self, folder: Path, role: str) -> None:
        self._folder, self._role = folder, role
        self._files = 0
        self.rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in COLUMNS}
        self.flush: Callable[[], None] = lambda: None

    def watch(self, engine: Engine) -> None:
        """Record an engine's steps and the messages that it sends and receives, and write them when it is idle."""
        step, receive, check = engine.step, engine.receive, engine.check

        def recorded_step() -> StepOutput:
            start = time.perf_counter()
            output = step()
            end = time.perf_counter()
            self.rows["step"].append((start, end))
            self._mark(end, output.proposals, output.commits)
            return output

        def recorded_receive(proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
            self._mark(time.perf_counter(), proposals, commits)
            receive(proposals, commits)

        def recorded_check() -> None:
            check()
            self.write()

        vars(engine).update(step=recorded_step, receive=recorded_receive, check=recorded_check)

    def _mark(self, now: float, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        self.rows["commits"] += [(now, commit.root_hash & _KEY_BITS) for commit in commits]
        self.rows["proposals"] += [(now, _key(proposal)) for proposal in proposals]

    def span(self, name: str, owner: Any, method: str) -> None:
        """Record the calls of a method that its owner looks up by name."""
        inner = getattr(owner, method)

        def recorded(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = inner(*arguments, **named)
            self.rows[name].append((start, time.perf_counter()))
            return result

        vars(owner)[method] = recorded

    def write(self) -> None:
        """Write the rows since the last call into the next file."""
        self.flush()
        taken, self.rows = self.rows, {name: [] for name in COLUMNS}
        arrays: Any = {name: np.array(rows, np.float64).reshape(-1, COLUMNS[name]) for name, rows in taken.items()}
        unfinished = self._folder / f".{self._role}.npz"
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)
        os.replace(unfinished, self._folder / f"{self._role}-{self._files:06}.npz")
        self._files += 1


def _key(proposal: Proposal) -> float:
    """Tells proposals apart: the anchor's path and the first token."""
    first = int(proposal.tokens[0]) + 1 if len(proposal.tokens) else 0
    return (proposal.anchor_hash ^ first * 0x9E3779B97F4A7C15) & _KEY_BITS


class Recordings:
    """The files of one service, read as they appear."""

    def __init__(self, folder: Path, role: str) -> None:
        self._folder, self._role, self._read = folder, role, 0

    def next(self, since: float, seconds: float = 3.0) -> Rows:
        """All rows since the last call; waits for a file that was written later than `since`, and has commits.

        A file is written once its engine has been idle for half a second. since: by the clock of files, while the
        engine was busy, or before. seconds: to wait at most
        """
        deadline, parts = time.monotonic() + seconds, list[Mapping[str, NDArray[np.float64]]]()
        while True:
            files = sorted(self._folder.glob(f"{self._role}-*.npz"))[self._read :]
            self._read += len(files)
            parts += [dict(np.load(file)) for file in files]
            late = [part for part, file in zip(parts[::-1], files[::-1], strict=False) if file.stat().st_mtime >= since]
            if any(len(part["commits"]) for part in late) or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        empty = {name: np.empty((0, columns)) for name, columns in COLUMNS.items()}
        return {name: np.concatenate([empty[name], *(part[name] for part in parts)]) for name in COLUMNS}
