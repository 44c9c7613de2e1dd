"""Is a service up, and if not, how far is it? gRPC health of an address, or HTTP /health of a URL."""

from __future__ import annotations

import asyncio
import http.client
import urllib.request
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.tls import ClientTls, open_channel
from outrider.transport.rpc import PROGRESS


async def is_healthy(
    address: str,
    seconds: float = 2.0,
    tell: Callable[[str], None] = lambda _: None,
    tls: ClientTls | None = None,
) -> bool:
    """True if the service serves. address: "host:port", "unix:/path" or "http(s)://host:port". seconds: to wait.

    tell: called with how far a start-up is, in words, if the service says so. tls: for gRPC, and for https, which
    without it trusts what the system does
    """
    if address.startswith(("http://", "https://")):
        return await asyncio.to_thread(_http_health, address, seconds, tls)
    async with open_channel(address, [("grpc.use_local_subchannel_pool", 1)], tls) as channel:
        try:
            call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=seconds)
            answer = await call
            for name, value in await call.trailing_metadata():
                if name == PROGRESS:
                    tell(str(value))
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _http_health(base_url: str, timeout: float, tls: ClientTls | None) -> bool:
    # Straight to the service: a proxy of the environment has no business between two local processes.
    https = urllib.request.HTTPSHandler(context=None if tls is None else tls.context())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https)
    try:
        with opener.open(base_url.rstrip("/") + "/health", timeout=timeout) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):  # such as a port that speaks something else
        return False
