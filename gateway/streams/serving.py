"""Whether a replica serves, by its health service: asked once, or awaited while it starts up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from outrider.errors import Unavailable

_SERVING = health_pb2.HealthCheckResponse.SERVING
_SOON = 0.1  # seconds until the next attempt to use a replica that serves already


async def check_serving(channel: grpc.aio.Channel, seconds: float) -> None:
    """Raise Unavailable until the service's health is SERVING, which follows its warm-up. seconds: for the answer."""
    stub: Any = HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
    if answer.status != _SERVING:
        raise Unavailable("it is warming up")


async def wait_serving(channel: grpc.aio.Channel, seconds: float) -> None:
    """Wait until the service's health turns to SERVING, or for some seconds.

    The service sends the change at once: the first request of a starting system waits for nothing else.
    """
    stub: Any = HealthStub(channel)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            with contextlib.suppress(grpc.aio.AioRpcError):  # it is lost, or too many callers watch it
                was_starting = False
                async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                    if answer.status == _SERVING:
                        if not was_starting:  # since the last attempt, or that one failed for another reason
                            await asyncio.sleep(_SOON)
                        return
                    was_starting = True
            await asyncio.sleep(seconds)


async def serving_changes(channel: grpc.aio.Channel) -> AsyncIterator[bool]:
    """Whether the service serves, now and at each change. Raises AioRpcError when it is lost."""
    stub: Any = HealthStub(channel)
    async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
        yield answer.status == _SERVING
