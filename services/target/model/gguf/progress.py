"""Progress of a long task: bars in a terminal, and a few lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

_LINES = 5  # a phase, in a log


class Phases:
    """Phases that follow one another; each may be tracked item by item. Use as a context."""

    def __init__(self, name: str, phases: Sequence[str], console: Console) -> None:
        """name: what is worked on. phases: in their order; any may be left out."""
        self._console = console
        self._name = name
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {phase: self._progress.add_task(f"{name}: {phase}", start=False, total=None)
                                          for phase in phases}  # fmt: skip
        self._present: str | None = None
        self._began = time.monotonic()

    def __enter__(self) -> Phases:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        self._progress.stop()

    def enter(self, phase: str) -> None:
        """Go on to a phase; the one before it is done."""
        if phase == self._present:
            return
        self._finish()
        self._present = phase
        self._began = time.monotonic()
        self._progress.start_task(self._tasks[phase])

    def track(self, phase: str, items: Iterable[Any]) -> Iterator[Any]:
        """The items, while the phase's share of them that is done is shown."""
        self.enter(phase)
        total = len(items) if isinstance(items, Sized) else None
        self._progress.update(self._tasks[phase], total=total)
        reported = 0
        for done, item in enumerate(items, start=1):
            yield item
            self._progress.update(self._tasks[phase], completed=done)
            if total and (done * _LINES) // total > reported and done < total:
                reported = (done * _LINES) // total
                self._say(f"{phase}: {100 * done // total}% of {total}")

    def _finish(self) -> None:
        if self._present is not None:
            self._progress.update(self._tasks[self._present], total=1, completed=1)
            self._say(f"{self._present}: done in {time.monotonic() - self._began:.1f} s")

    def _say(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{self._name}: {text}", markup=False, highlight=False, soft_wrap=True)
