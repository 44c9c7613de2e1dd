"""What the supervisor reports of the draft service, without which the others serve: to its log, and to the gateway.

The gateway answers in /health why the draft is away. A draft that runs reports its reason itself; a process that ended
cannot, so the supervisor writes its exit code and last error into a file that the gateway reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from pathlib import Path

from outrider.process.backoff import Backoff
from outrider.supervisor.processes import Child

log = logging.getLogger(__name__)

# A draft that takes a minute to compile and then ends must not occupy the machine: waits reset late.
DRAFT_BACKOFF = Backoff(first=0.5, longest=60.0, reset_after=120.0, jitter=0.2)
_POLL_SECONDS = 1.0


class DraftWatch:
    """Follows the life of the draft process. Use: create it, then `run` it beside the child."""

    def __init__(self, child: Child, report: Path, *, alone: bool = True) -> None:
        """report: the file for the gateway. alone: there is no other draft service."""
        self._child = child
        self._report = report
        self._alone = alone
        self._down = asyncio.Event()
        child.on_end = self._ended

    async def run(self) -> None:
        """Log each time that the draft service becomes ready. Never returns."""
        while True:
            await self._child.wait_ready(_POLL_SECONDS)
            self._report.unlink(missing_ok=True)
            name = "the draft service" if self._alone else self._child.name
            log.info("%s is ready; its proposals are verified from now on", name)
            self._down.clear()
            await self._down.wait()

    def _ended(self, code: int, wait: float) -> None:
        self._down.set()
        why = f"the {self._child.name} process ended with {exit_code(code)}"
        if self._child.reason:
            why += f', after "{self._child.reason}"'
        until = "text is decoded plainly" if self._alone else "its sessions use the other drafts, or decode plainly,"
        log.warning(
            "%s; %s until it is back, in %.1f s at the earliest. With --require-draft the system ends if its draft "
            "does not start",
            why,
            until,
            wait,
        )
        with contextlib.suppress(OSError):  # on a full disk the gateway reports only that nothing answers
            self._report.write_text(f"{why}; restarted after {wait:.1f} s", encoding="utf-8")


def exit_code(code: int) -> str:
    """An exit code in words: negative codes are signals."""
    if code >= 0:
        return f"code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
