"""What a user sees while the processes start, and once they are ready."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.panel import Panel
from rich.status import Status
from rich.table import Table

from outrider.telemetry import say


class Display:
    """A status line on a terminal; plain lines elsewhere. Goes to standard error, like the logs."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._start = time.monotonic()
        self._said = ""

    def line(self, text: str) -> None:
        """Pass on a line that a process wrote, as it is."""
        if self._status is None:
            say(text)
        else:
            self.console.out(text, highlight=False)

    def progress(self, text: str) -> None:
        """Say what is being waited for."""
        if not self.console.is_terminal:
            self.line(text)
            return
        if self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        self._status.update(text)

    def starting(self, states: Mapping[str, str | None]) -> None:
        """Say which processes are ready (None), and how far the others are. Says nothing twice."""
        words = {name: "ready" if state is None else state or "…" for name, state in states.items()}
        text = "starting: " + ", ".join(f"{name} {state}" for name, state in words.items())
        if text != self._said:
            self._said = text
            self.progress(text)

    def ready(self, facts: Sequence[tuple[str, str]], curl: str) -> None:
        """Take the status line away and show where the system is reached."""
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
        """Take the status line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def first_curl(url: str) -> str:
    """A command that asks the first question."""
    body = '{"model": "default", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    return shlex.join(["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body])
