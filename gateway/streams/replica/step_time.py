"""How long a replica's steps take, as an average over its reports, so that faster replicas get more sessions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from outrider.wire.v1 import common_pb2

_EMA_WEIGHT = 0.05  # of the last report, so that twenty reports decide
_MIN_SECONDS = 0.002  # of a step; what takes less time differs by chance
_HALF_LIFE = 30.0  # seconds without a report after which half of a difference to other replicas still counts


class StepTime:
    """A moving geometric mean of the durations of steps, which a single long step moves little."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported_at = 0.0
        self._reports = 0
        self._log = 0.0

    def add(self, load: common_pb2.EngineLoad) -> None:
        """Take a report; that of an idle engine repeats its last step and is skipped."""
        if not load.step_microseconds or not load.running_sessions:
            return
        self._reports += 1
        seconds = max(load.step_microseconds / 1e6, _MIN_SECONDS)
        self._log += (math.log(seconds) - self._log) * max(_EMA_WEIGHT, 1 / self._reports)
        self._reported_at = self._clock()

    @property
    def seconds(self) -> float:
        """The mean, in seconds; 0 before the first report."""
        return math.exp(self._log) if self._reports else 0.0

    @property
    def weight(self) -> float:
        """How much of a difference to other replicas counts: 1 for a fresh average of many reports.

        With time it counts less, so that a replica that was slow once gets sessions again, which measure it anew.
        """
        return min(1.0, self._reports * _EMA_WEIGHT) * float(0.5 ** ((self._clock() - self._reported_at) / _HALF_LIFE))
