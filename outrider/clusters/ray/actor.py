"""The controller as a Ray actor. Ray starts it again, on another node if need be, from the same plan."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from outrider.clusters.ray.controller import Controller
from outrider.clusters.ray.plan import PoolPlan
from outrider.clusters.ray.platform import RayPlatform
from outrider.telemetry import setup_logging

log = logging.getLogger(__name__)

_STEP_SECONDS = 1.0  # between two looks at the pool


class ControllerActor:
    """Runs a controller until it is stopped. Its methods run in the event loop of a Ray actor."""

    def __init__(self, plan: PoolPlan) -> None:
        setup_logging("ray")
        self._controller = Controller(plan, RayPlatform(plan.name, plan.units))
        self._life = asyncio.get_running_loop().create_task(self._run(), name="controller")

    async def describe(self) -> dict[str, Any]:
        """As of Controller."""
        return self._controller.describe()

    async def stop(self) -> None:
        """End the pool."""
        self._life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._life
        await self._controller.stop()

    async def _run(self) -> None:
        while True:
            try:
                await self._controller.step()
            except Exception:  # a bug, or a cluster without its head: the pool goes on as it is
                log.exception("the state of the pool cannot be read")
            await asyncio.sleep(_STEP_SECONDS)
