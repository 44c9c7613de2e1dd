"""Terminal output of `outrider serve`: progress of the start-up, then the system's addresses."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.panel import Panel
from rich.status import Status
from rich.table import Table

from outrider.telemetry import write_line


class Display:
    """A status line on a terminal, plain lines elsewhere. Written to standard error, like the logs."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._start = time.monotonic()
        self._last_text = ""

    def line(self, text: str) -> None:
        """Write a line of a process's output unchanged."""
        if self._status is None:
            write_line(text)
        else:
            self.console.out(text, highlight=False)

    def progress(self, text: str) -> None:
        """Show what the start-up waits for."""
        if not self.console.is_terminal:
            self.line(text)
            return
        if self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        self._status.update(text)

    def starting(self, states: Mapping[str, str | None]) -> None:
        """Show the state of each process: None if it is ready, else its progress. Unchanged states are not repeated."""
        words = {name: "ready" if state is None else state or "…" for name, state in states.items()}
        text = "starting: " + ", ".join(f"{name} {state}" for name, state in words.items())
        if text != self._last_text:
            self._last_text = text
            self.progress(text)

    def ready(self, facts: Sequence[tuple[str, str]], curl: str) -> None:
        """Replace the status line by facts about the ready system and a first command."""
        self.close()
        table = Table.grid(padding=(0, 2))
        for name, value in facts:
            table.add_row(name, value)
        seconds = time.monotonic() - self._start
        title = f"Outrider is ready after {seconds:.0f} s"
        if self.console.is_terminal:
            self.console.print(Panel(table, title=title, title_align="left", expand=False))
        else:
            self.line("\n".join([title, *(f"  {name:<8} {value}" for name, value in facts)]))
        self.line(f"\nTry:\n  {curl}\n\nCtrl-C ends it.")

    def close(self) -> None:
        """Remove the status line."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def first_curl(url: str) -> str:
    """A shell command that sends a first request."""
    body = '{"model": "default", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    return shlex.join(["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body])
