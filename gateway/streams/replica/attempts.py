"""Attempts to connect to a replica, one after the other for as long as its link lives."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import grpc

from gateway.streams.serving import wait_serving

_MIN_WAIT = 0.1  # seconds between attempts
MAX_WAIT = 2.0  # seconds between attempts
_STARTING_WAIT = 1.0  # seconds between attempts while the replica reports that it starts up
_JITTER = 0.2  # of a wait, so that gateways do not reconnect all at once
_STABLE_AFTER = 2.0  # seconds after which a stream counts as working


class Attempt(NamedTuple):
    """An attempt that has ended. opened: when its stream opened, by the monotonic clock; infinite if it did not.

    longest_wait: seconds until the next one at most. starting: the replica starts up
    """

    opened: float
    longest_wait: float
    starting: bool


class Attempts:
    """Repeats attempts, which slow down while streams end soon after they open."""

    def __init__(
        self, name: str, attempt: Callable[[], Awaitable[Attempt]], open_channel: Callable[[], grpc.aio.Channel]
    ) -> None:
        """attempt: connects, and returns after the loss. open_channel: to the replica, for its health."""
        self._name = name
        self._attempt, self._open_channel = attempt, open_channel
        self._task: asyncio.Task[None] | None = None
        self._restart: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name=self._name)

    def restart(self) -> None:
        """End the present attempt and begin anew."""
        if self._restart is None or self._restart.done():  # otherwise a restart is under way
            self._restart = asyncio.create_task(self._start_again())

    async def _start_again(self) -> None:
        if self._task is not None:
            await self._end(self._task)
            self.start()

    async def stop(self) -> None:
        """End the present attempt; it is the last one."""
        if self._restart is not None:
            self._restart.cancel()
        if self._task is not None:
            await self._end(self._task)

    async def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait({task})

    async def _run(self) -> None:
        wait = _MIN_WAIT
        while True:
            opened, longest, starting = await self._attempt()
            longest = _STARTING_WAIT if starting else longest
            wait = _MIN_WAIT if time.monotonic() - opened > _STABLE_AFTER else min(2 * wait, longest)
            await self._rest(wait * random.uniform(1 - _JITTER, 1 + _JITTER), starting)

    async def _rest(self, seconds: float, starting: bool) -> None:
        """Wait before the next attempt; a replica that starts up is used as soon as it serves."""
        if starting:
            async with self._open_channel() as channel:
                await wait_serving(channel, seconds)
        else:
            await asyncio.sleep(seconds)
