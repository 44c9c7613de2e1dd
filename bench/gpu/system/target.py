"""The target service with clocks. `python -m bench.gpu.system.target FOLDER FLAGS...` writes recordings into FOLDER."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu.system.recording import Recorder
from services.target.process import app
from services.target.sampling.samples import LaunchedStep
from services.target.step.batch import Batch, SessionWork
from services.target.step.prepared import PreparedSpans

if TYPE_CHECKING:
    from services.target.engine.engine import TargetEngine


class LaunchClock:
    """Times the launches of steps, forward pass and sampling together: on the host's clock and on the device's.

    On CUDA, the device's time lies between two events around a launch, and is brought to the host's clock by one more
    event while the engine is idle. It includes pauses inside the launch, in which the device waits for the host's next
    kernel; a captured step has few. On a CPU, a launch computes.
    """

    def __init__(self, engine: TargetEngine, recorder: Recorder) -> None:
        self._recorder = recorder
        self._on_cuda = engine.model.device.type == "cuda"
        self._compute = engine.launcher.compute
        self._pending: list[tuple[float, float, Any, Any, int]] = []
        vars(engine.launcher)["compute"] = self.compute
        recorder.flush = self.flush

    def compute(
        self, batch: Batch, works: Sequence[SessionWork], prepared: PreparedSpans | None = None, *, ahead: bool = False
    ) -> LaunchedStep:
        """As of `Launcher`."""
        begin, start = self._event(), time.perf_counter()
        step = self._compute(batch, works, prepared, ahead=ahead)
        end, done = self._event(), time.perf_counter()
        self._pending.append((start, done, begin, end, sum(len(work.draft) for work in works)))
        self._recorder.span("read", step, "read")
        return step

    def _event(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def flush(self) -> None:
        """Turn the launches into rows. The engine is idle, so the device has finished them."""
        now = self._event()
        if self._on_cuda:
            now.synchronize()
        reached = time.perf_counter()
        for start, done, *device, drafts in self._pending:
            bar = [reached - event.elapsed_time(now) / 1e3 for event in device] if self._on_cuda else device
            self._recorder.rows["launch"].append((start, done, *bar, drafts))
        self._pending = []


def main(folder: str, flags: Sequence[str]) -> int:
    """Run the service. Returns its exit code."""
    recorder = Recorder(Path(folder), "target")

    def prepare(engine: TargetEngine) -> None:
        LaunchClock(engine, recorder)
        recorder.watch(engine)

    return app.main(flags, prepare)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
