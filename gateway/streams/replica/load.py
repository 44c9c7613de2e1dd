"""How busy a replica is: the sessions that are open there, and what its engine reports."""

from __future__ import annotations

from gateway.streams.replica.step_time import StepTime
from outrider.wire.v1 import common_pb2


class ReplicaLoad:
    """By which the placement chooses a replica.

    session_count: sessions that are open there, counted by the placement
    report: the engine's last one on this stream; None before the first. step_time: an average over the reports
    """

    def __init__(self) -> None:
        self.session_count = 0
        self.report: common_pb2.EngineLoad | None = None
        self.step_time = StepTime()

    def update(self, report: common_pb2.EngineLoad) -> None:
        """Take the engine's report."""
        self.report = report
        self.step_time.add(report)

    def forget(self) -> None:
        """Drop the reports: another process may come, or its sessions end meanwhile."""
        self.report, self.step_time = None, StepTime()
