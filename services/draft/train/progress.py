"""Progress of a training run: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.telemetry import write_line

_EVERY = 15.0  # seconds between lines


class Bar:
    """Progress of one stage, as a context manager. total: the value of `at` at which the stage is done."""

    def __init__(self, title: str, total: int, start: int = 0) -> None:
        """start: progress of earlier runs."""
        self._title, self._total, self._start = title, total, start
        self._began = self._last_line = time.monotonic()
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
        """Report progress. done: of `total`; facts: text to show beside it."""
        self._bar.update(self._task, completed=done, facts=facts)
        now = time.monotonic()
        if self._console.is_terminal or (now - self._last_line < _EVERY and done < self._total):
            return
        self._last_line = now
        speed = (done - self._start) / max(now - self._began, 1e-9)
        left = (self._total - done) / speed if speed else 0.0
        minutes, seconds = divmod(round(max(left, 0.0)), 60)
        self.line(f"{self._title}: {done} of {self._total}, {minutes}:{seconds:02} left, {facts}")

    def line(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        if self._console.is_terminal:
            self._bar.console.out(text, highlight=False)
        else:
            write_line(text)
