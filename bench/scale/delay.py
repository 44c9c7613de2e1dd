"""A simulated network delay: a proxy between Unix sockets that forwards all bytes in order after a fixed time.

`python -m bench.scale.delay LISTEN_PATH CONNECT_PATH SECONDS`
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable

import uvloop

_PIECE = 1 << 18


async def _forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seconds: Callable[[], float]) -> None:
    """Forward one direction, including the end of the stream, `seconds` late, but never before what came earlier."""
    loop = asyncio.get_running_loop()
    in_transit: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, piece = await in_transit.get()
            if (left := due - loop.time()) > 0:
                await asyncio.sleep(left)
            if not piece:
                sink.write_eof()
                return
            sink.write(piece)
            await sink.drain()

    delivery = asyncio.create_task(deliver())
    try:
        piece = b"-"
        while piece:
            piece = await source.read(_PIECE)
            in_transit.put_nowait((loop.time() + seconds(), piece))
        await delivery
    finally:
        delivery.cancel()


async def serve(listen: str, connect: str, seconds: Callable[[], float]) -> None:
    """Forward connections from `listen` to `connect` until cancelled. seconds: returns the present delay, one way."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(connect)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(_forward(reader, far_writer, seconds), _forward(far_reader, writer, seconds))
        except ConnectionError:
            pass
        finally:
            far_writer.close()
            writer.close()

    server = await asyncio.start_unix_server(relay, listen)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _seconds = float(sys.argv[3])
        uvloop.run(serve(sys.argv[1], sys.argv[2], lambda: _seconds))
