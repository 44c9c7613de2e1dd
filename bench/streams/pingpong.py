"""The floor: a bare grpc.aio stream between two processes, bytes there and back, nothing else.

As a module it is the echoing process: `python -m bench.streams.pingpong ADDRESS`.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

METHOD = "/bench.Echo/Stream"


async def _echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:  # noqa: ARG001
    async for request in requests:
        yield request


async def serve(address: str) -> None:
    """Echo until the process is killed."""
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Echo", {"Stream": handler})])
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


async def _measure(address: str, sizes: list[int], rounds: int) -> list[float]:
    medians = []
    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 20)
        for size in sizes:
            call = channel.stream_stream(METHOD)()
            payload = b"x" * size
            times = []
            for _ in range(rounds):
                start = time.perf_counter()
                await call.write(payload)
                await call.read()
                times.append(time.perf_counter() - start)
            medians.append(1e6 * statistics.median(times[rounds // 10 :]))
            await call.done_writing()
    return medians


def round_trips(address: str, sizes: list[int], rounds: int = 1000) -> list[float]:
    """Median round trip in microseconds for frames of given sizes in bytes."""
    process = subprocess.Popen([sys.executable, "-m", "bench.streams.pingpong", address])
    try:
        return uvloop.run(_measure(address, sizes, rounds))
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
