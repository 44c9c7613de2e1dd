"""When steps with hidden states are captured: while the engine has no session, otherwise in a small part of its time.

A draft may connect at any time, and only then is it known which states it reads. An idle engine captures the steps one
after the other, and takes messages in between, so that a session waits for one capture at most. While sessions run,
steps that are not captured yet run uncaptured; those that were needed are captured first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from services.target.model.base import CapturesSteps, Runner
from services.target.step.batch import Capture

_SHARE = 0.1  # of the time, while sessions run


class StepCaptures:
    """Captures the steps of a runner; does nothing for runners that capture none."""

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner = runner if isinstance(runner, CapturesSteps) else None
        self._clock = clock
        self._resume = -math.inf  # when the next capture may begin, while sessions run

    def expect(self, layers: tuple[int, ...], *, final: bool) -> None:
        """Steps may soon have to return such hidden states; see Capture."""
        if self._runner is not None:
            self._runner.expect(Capture(layers, final, None))

    @property
    def pending(self) -> bool:
        """True if there are steps to capture."""
        return self._runner is not None and self._runner.due > 0

    @property
    def ready(self) -> bool:
        """True if one should be captured now, although sessions run."""
        return self.pending and self._clock() >= self._resume

    def proceed(self) -> None:
        """Capture one step. No step may be in flight."""
        assert self._runner is not None, "a step is pending"
        start = self._clock()
        self._runner.capture_next()
        end = self._clock()
        self._resume = end + (end - start) * (1 / _SHARE - 1)
