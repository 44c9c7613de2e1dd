"""Health checks: gRPC health of an address, or HTTP /health/ready of a gateway's URL."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.service_token import with_token
from outrider.tls import ClientTls, open_channel
from outrider.transport.statuses import PROGRESS


async def is_healthy(
    address: str,
    seconds: float = 2.0,
    on_progress: Callable[[str], None] = lambda _: None,
    tls: ClientTls | None = None,
    token: str | None = None,
) -> bool:
    """True if a service is healthy. A gateway is if it can serve, with a draft or without.

    As status_of.
    """
    return bool(await status_of(address, seconds, on_progress, tls, token))


async def status_of(
    address: str,
    seconds: float = 2.0,
    on_progress: Callable[[str], None] = lambda _: None,
    tls: ClientTls | None = None,
    token: str | None = None,
) -> bool | None:
    """Whether a service is healthy; None if it does not answer.

    address: "host:port" or "unix:/path" of a gRPC service, or "http(s)://host:port". seconds: maximum wait.
    on_progress: called with the progress of the start-up, as text, if the service reports it. tls: for gRPC and https;
    https without it uses the system's authorities. token: of the services, without which they report no progress
    """
    if address.startswith(("http://", "https://")):
        return await asyncio.to_thread(_http_health, address, seconds, tls)
    async with open_channel(address, [("grpc.use_local_subchannel_pool", 1)], tls) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(with_token(channel, token))
            call = stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
            answer = await call
            for name, value in await call.trailing_metadata():
                if name == PROGRESS:
                    on_progress(str(value))
        except grpc.aio.AioRpcError as error:
            silent = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            return None if silent else False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _http_health(base_url: str, timeout: float, tls: ClientTls | None) -> bool | None:
    # No proxy of the environment: both processes are local.
    https = urllib.request.HTTPSHandler(context=None if tls is None else tls.context())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https)
    try:
        with opener.open(base_url.rstrip("/") + "/health/ready", timeout=timeout) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False
    except (OSError, http.client.HTTPException):  # for example, the port has another protocol
        return None
