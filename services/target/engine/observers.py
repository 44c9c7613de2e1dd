"""What an engine reports of sessions and steps to people: spans, and lines of the log."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.serving.session import Session
from outrider.speculation.proposal import Commit
from outrider.tracing import Tracing
from services.target.engine import trace_spans
from services.target.engine.step_log import StepLog
from services.target.step.batch import SessionWork


class Observers:
    """Those of one engine.

    tracing: receives spans of sessions. step_log: writes lines about steps. None where a flag switches it off
    """

    def __init__(self) -> None:
        self.tracing: Tracing | None = None
        self.step_log: StepLog | None = None

    def ended(self, session: Session) -> None:
        """A session has ended."""
        if self.tracing is not None and session.record.traceparent:
            trace_spans.add_spans(self.tracing, session)

    def settled(
        self, works: Sequence[SessionWork], commits: Sequence[Commit], steps: int, started: float, ended: float
    ) -> None:
        """A step was settled; arguments as of StepLog."""
        if self.step_log is not None:
            self.step_log.note(works, commits, steps, started, ended)

    def idle(self) -> None:
        """The engine has nothing to do."""
        if self.step_log is not None:
            self.step_log.pause()
