"""How long a replica's steps take, as an average over its reports, so that faster replicas get more sessions."""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.wire.v1 import common_pb2

_EMA_WEIGHT = 0.05
_HALF_LIFE = 30.0  # seconds without a report after which half of a difference to other replicas still counts


class StepTime:
    """An exponential moving average of the durations of steps, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported_at = 0.0
        self.seconds = 0.0  # 0 before the first report

    def add(self, load: common_pb2.EngineLoad) -> None:
        """Take a report; that of an idle engine repeats its last step and is skipped."""
        if not load.step_microseconds or not load.running_sessions:
            return
        seconds = load.step_microseconds / 1e6
        self.seconds += (seconds - self.seconds) * (_EMA_WEIGHT if self.seconds else 1.0)
        self._reported_at = self._clock()

    @property
    def weight(self) -> float:
        """How much of a difference to other replicas counts: 1 for a fresh average, less for an old one.

        A replica that was slow once gets sessions again, which measure it anew.
        """
        if not self.seconds:
            return 0.0
        return float(0.5 ** ((self._clock() - self._reported_at) / _HALF_LIFE))
