"""What a replica reports of its health: when it can be used, and that it stops or hangs while its stream is open."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from outrider.errors import Unavailable

log = logging.getLogger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING


async def check_serving(channel: grpc.aio.Channel, seconds: float) -> None:
    """Raise Unavailable until the service's health is SERVING, which follows its warm-up. seconds: maximum wait."""
    stub: Any = HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
    if answer.status != _SERVING:
        raise Unavailable("it is warming up")


async def follow_health(channel: grpc.aio.Channel, serves: Callable[[bool], None]) -> None:
    """Call `serves` with the present health and every later one, until cancelled or until the service ends the call."""
    stub: Any = HealthStub(channel)
    try:
        async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
            serves(answer.status == _SERVING)
    except grpc.aio.AioRpcError as error:  # its sessions move when its stream ends
        log.debug("the health of a replica is not watched: %s", error.details())
