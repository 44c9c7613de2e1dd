"""The floor: bare frames between two processes over a Unix domain socket, there and back, nothing else.

As a module it is the echoing process: `python -m bench.streams.pingpong PATH`.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time

import uvloop
from google.protobuf.wrappers_pb2 import BytesValue

from outrider.serving.pipe import Pipe

_PATIENCE = 20.0  # seconds that the other process gets to start


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pipe = Pipe(reader, writer)
    async for message in pipe.messages(BytesValue):
        await pipe.write(message)
    pipe.close()


async def serve(path: str) -> None:
    """Echo until the process is killed."""
    server = await asyncio.start_unix_server(_echo, path)
    await server.serve_forever()


async def _connect(path: str) -> Pipe:
    async with asyncio.timeout(_PATIENCE):
        while True:
            try:
                return Pipe(*await asyncio.open_unix_connection(path))
            except OSError:
                await asyncio.sleep(0.05)


async def _measure(path: str, sizes: list[int], rounds: int) -> list[float]:
    medians = []
    pipe = await _connect(path)
    for size in sizes:
        payload = BytesValue(value=b"x" * size)
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            await pipe.write(payload)
            await pipe.read()
            times.append(time.perf_counter() - start)
        medians.append(1e6 * statistics.median(times[rounds // 10 :]))
    pipe.close()
    return medians


def round_trips(path: str, sizes: list[int], rounds: int = 1000) -> list[float]:
    """Median round trip in microseconds for frames of given sizes in bytes."""
    process = subprocess.Popen([sys.executable, "-m", "bench.streams.pingpong", path])
    try:
        return uvloop.run(_measure(path, sizes, rounds))
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
