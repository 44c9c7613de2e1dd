"""What a user sees of a training: a bar on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.telemetry import write_line

_EVERY = 15.0  # seconds between lines


class Bar:
    """Progress of one part of the work. A context manager. total: what `at` counts towards."""

    def __init__(self, title: str, total: int, start: int = 0) -> None:
        """start: what was done before."""
        self._title, self._total, self._start = title, total, start
        self._began = self._told = time.monotonic()
        self._console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[facts]}"),
        )  # fmt: skip
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task(title, total=total, completed=start, facts="")

    def __enter__(self) -> Bar:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def at(self, done: int, facts: str = "") -> None:
        """So much is done."""
        self._bar.update(self._task, completed=done, facts=facts)
        now = time.monotonic()
        if self._console.is_terminal or (now - self._told < _EVERY and done < self._total):
            return
        self._told = now
        speed = (done - self._start) / max(now - self._began, 1e-9)
        left = (self._total - done) / speed if speed else 0.0
        minutes, seconds = divmod(round(max(left, 0.0)), 60)
        self.line(f"{self._title}: {done} of {self._total}, {minutes}:{seconds:02} left, {facts}")

    def line(self, text: str) -> None:
        """Say something beside the bar."""
        if self._console.is_terminal:
            self._bar.console.out(text, highlight=False)
        else:
            write_line(text)
