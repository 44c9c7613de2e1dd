"""The faults: what each does to a process or its network, and how it ends.

A fault that kills a process leaves its return to the supervisor; others are taken back after `hold` seconds, or when
all streams have ended.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.chaos.clients import Readers
from tests.chaos.emulator import Rule
from tests.chaos.memory import out_of_memory
from tests.chaos.system import System

HALF_OPEN_SECONDS = 6.0
_SLOW_SECONDS = 8.0
_SLOW_RATE = 6_000.0  # bytes per second that a slow service reads and writes
_CLOCK_STEP = 3600  # seconds, forwards and then back


@dataclass
class Scene:
    """Where a fault happens. victim: the process that it hits; seconds: length of a stop or a cut."""

    system: System
    role: str
    victim: int
    readers: Readers
    seconds: float

    def network(self, rule: Rule | None) -> None:
        """Set the rule of the role's network; None for an ideal one."""
        self.system.network.set({} if rule is None else {self.role: rule})


async def _nothing(scene: Scene) -> None:
    return


async def _kill(scene: Scene) -> None:
    os.kill(scene.victim, signal.SIGKILL)


async def _stop(scene: Scene) -> None:
    os.kill(scene.victim, signal.SIGSTOP)


async def _continue(scene: Scene) -> None:
    os.kill(scene.victim, signal.SIGCONT)


async def _out_of_memory(scene: Scene) -> None:
    await asyncio.to_thread(out_of_memory, scene.victim)


async def _fill_disk(scene: Scene) -> None:
    """A process that starts anew finds no cache, and no room for one."""
    disk = scene.system.disk(scene.role)
    shutil.rmtree(disk / "outrider", ignore_errors=True)
    try:
        with (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
    except OSError:
        pass
    os.kill(scene.victim, signal.SIGKILL)


async def _empty_disk(scene: Scene) -> None:
    (scene.system.disk(scene.role) / "filler").unlink()


async def _half_open(scene: Scene) -> None:
    """The process dies behind a cut, so its peers see no end of their connections."""
    scene.network(Rule(cut=True))
    os.kill(scene.victim, signal.SIGKILL)


async def _read_slowly(scene: Scene) -> None:
    """A slow service: its network takes little. A slow reader of the gateway: clients that do not read."""
    if scene.role == "gateway":
        scene.readers.stop()
    else:
        scene.network(Rule(rate=_SLOW_RATE))


async def _read_on(scene: Scene) -> None:
    scene.readers.go_on()
    scene.network(None)


async def _step_clock(scene: Scene) -> None:
    scene.system.set_clock(scene.role, _CLOCK_STEP)


async def _step_back(scene: Scene) -> None:
    scene.system.set_clock(scene.role, 0)


def _network(rule: Rule) -> Callable[[Scene], Awaitable[None]]:
    async def begin(scene: Scene) -> None:
        scene.network(rule)

    return begin


async def _ideal_network(scene: Scene) -> None:
    scene.network(None)


@dataclass(frozen=True)
class Fault:
    """hold: seconds between begin and end, "long" for those of the command line, None until all streams have ended.
    kills: the process dies"""

    name: str
    begin: Callable[[Scene], Awaitable[None]]
    end: Callable[[Scene], Awaitable[None]] = _nothing
    hold: float | str | None = 0.0
    kills: bool = False


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("none", _nothing),
        Fault("SIGKILL", _kill, kills=True),
        Fault("SIGSTOP", _stop, _continue, hold="long"),
        Fault("OOM kill", _out_of_memory, kills=True),
        Fault("disk full", _fill_disk, _empty_disk, hold=10.0, kills=True),
        Fault("network cut", _network(Rule(cut=True)), _ideal_network, hold="long"),
        Fault("200 ms delay", _network(Rule(delay=0.2)), _ideal_network, hold=None),
        Fault("5 % loss", _network(Rule(loss=0.05)), _ideal_network, hold=None),
        Fault("reordering", _network(Rule(reordered=0.3)), _ideal_network, hold=None),
        Fault("half-open", _half_open, _ideal_network, hold=HALF_OPEN_SECONDS, kills=True),
        Fault("slow reader", _read_slowly, _read_on, hold=_SLOW_SECONDS),
        Fault("clock step", _step_clock, _step_back, hold=1.0),
    )
}
