"""The costs of steps, kept in a file for each machine and model, so that a later start need not measure them first.

A file holds what one measurement found, with a checksum. It is of one processor, number of cores, build of the kernels,
checkpoint and set of flags; for another one there is another file. A file that is torn, or of another form, is ignored.
What it holds may be outdated, for instance because other programs ran at the time. So the target measures again while
no session has come (`measure_again`); with sessions, their steps correct the model. Other programs may run at that time
too, and they only slow steps down: so a faster measurement counts at once, a slower one by degrees.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.checkpoints import checkpoint, disk
from outrider.checkpoints.conversion import cache_folder
from outrider.config import TargetConfig
from outrider.errors import Unavailable
from outrider.serving.loop import EngineLoop
from services.target.kernels.cpu import build, library
from services.target.process.costs import CostMeter, Point, step_by_step
from services.target.speculation.budget import Budget
from services.target.speculation.estimates.step_cost import StepCost

if TYPE_CHECKING:
    from services.target.engine.engine import TargetEngine

log = logging.getLogger(__name__)

_FORM = 1  # of the file; increase when it, or what is measured, changes
_MOST_FILES, _MOST_BYTES = 64, 1 << 16
_IDLE_SECONDS = 5.0  # after the start, before costs are measured again
_PAUSE = 0.2  # seconds between two timed steps
_PASSES = 2
_MAX_GROWTH = 1.1  # of what is kept, by one measurement: other programs may run for longer than it takes
# Flags of the target that change what a step costs.
_FLAGS = (
    "device", "dtype", "quantization", "kv_cache_dtype", "page_size", "attention_backend", "deterministic",
    "enable_torch_compile", "tp_size", "nnodes", "self_speculation", "self_speculation_format",
)  # fmt: skip


class KeptCosts:
    """The file of one machine, model and set of flags."""

    def __init__(self, folder: Path, config: TargetConfig) -> None:
        """folder: of the checkpoint."""
        facts = {"form": _FORM, "model": checkpoint.fingerprint(folder)} | _machine()
        facts |= {name: getattr(config, name) for name in _FLAGS}
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.path = cache_folder() / "costs" / f"{key[:32]}.json"

    def read(self, points: Sequence[Point]) -> dict[Point, float] | None:
        """Seconds of the points; None if there is no valid file of exactly these."""
        try:
            if self.path.stat().st_size > _MOST_BYTES:
                return None
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["sha256"] != _digest(content["seconds"]):
                raise ValueError("its checksum is another")
            seconds = {Point(int(kv), int(tokens)): float(time) for kv, tokens, time in content["seconds"]}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s cannot be used, so costs are measured: %r", self.path, error)
            return None
        proper = all(math.isfinite(time) and time > 0.0 for time in seconds.values())
        return seconds if proper and list(seconds) == list(points) else None

    def write(self, seconds: dict[Point, float]) -> None:
        """Keep a measurement. A cache that cannot be written keeps none."""
        rows = [[point.kv_tokens, point.tokens, time] for point, time in seconds.items()]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            disk.write_atomically(self.path, json.dumps({"sha256": _digest(rows), "seconds": rows}) + "\n")
            self._prune()
        except OSError as error:
            log.info("the costs of steps are not kept: %s", error)

    def bounded(self, seconds: dict[Point, float]) -> dict[Point, float]:
        """A new measurement, as far as it may exceed what is kept."""
        kept = self.read([*seconds]) or seconds
        return {point: min(time, _MAX_GROWTH * kept[point]) for point, time in seconds.items()}

    def _prune(self) -> None:
        """Remove the oldest files beyond the most that are kept."""
        files = sorted(self.path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files[_MOST_FILES:]:
            file.unlink(missing_ok=True)


def _digest(rows: Any) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _machine() -> dict[str, Any]:
    """Processor, cores and the build of the kernels."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return {
        "processor": [line for line in lines if line.startswith(("model name", "CPU part"))][:1],
        "cores": len(os.sched_getaffinity(0)),
        "kernels": str(build.KERNELS.found()) if library.available() else "",
        "torch": torch.__version__,
    }


def starting_cost(engine: TargetEngine, kept: KeptCosts | None, passes: int) -> StepCost | None:
    """The cost model that an engine begins with: the one that was kept, else measured now. None with a small cache.

    passes: of the measurement without a file to keep it in. With one a single pass is enough: `measure_again` follows
    """
    meter = CostMeter(engine)
    kept = kept if _keeps(engine) else None
    found = kept.read(meter.points) if kept is not None else None
    if found is not None:
        meter.seconds = found
        return meter.cost()
    cost = meter.measure(passes if kept is None else 1)
    if cost is not None and kept is not None:
        kept.write(meter.seconds)
    return cost


def _keeps(engine: TargetEngine) -> bool:
    """True if the costs of an engine are kept: those of accelerators, which are measured fast, are not."""
    return engine.model.device.type == "cpu"


async def measure_again(loop: EngineLoop, engine: TargetEngine, kept: KeptCosts) -> None:
    """Measure costs again, step by step, for as long as no session comes; then keep and use them.

    A session that comes meanwhile waits for one step at most, and ends the measurement.
    """
    meter = CostMeter(engine)
    used = engine.speculation.planner.budget.cost
    observed = used.observed

    def untouched() -> bool:
        return engine.idle and not engine.sessions.by_id and used.observed == observed

    def time(point: Point) -> bool:
        if not untouched():
            return False
        with step_by_step(engine):
            meter.time(point)
        engine.forget_measurements()
        return True

    def take_over() -> None:
        if untouched():
            engine.speculation.planner.budget = Budget(meter.cost())

    if not _keeps(engine):
        return
    await asyncio.sleep(_IDLE_SECONDS)
    with contextlib.suppress(Unavailable):  # the engine has stopped
        for point in meter.points * _PASSES:
            if not await asyncio.wrap_future(loop.call(partial(time, point))):
                return
            await asyncio.sleep(_PAUSE)
        if meter.complete:
            meter.seconds = await asyncio.to_thread(kept.bounded, meter.seconds)
            await asyncio.to_thread(kept.write, meter.seconds)
            await asyncio.wrap_future(loop.call(take_over))
            log.info("%s, measured again", meter.cost().describe())
