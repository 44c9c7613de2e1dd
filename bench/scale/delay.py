"""A network with a delay: a proxy between Unix sockets that hands every byte on, so many seconds later, in order.

`python -m bench.scale.delay LISTEN_PATH CONNECT_PATH SECONDS`
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import uvloop

_PIECE = 1 << 18


async def _hand_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seconds: float) -> None:
    """Everything that arrives in one direction; the end, too."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, piece = await under_way.get()
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
            under_way.put_nowait((loop.time() + seconds, piece))
        await delivery
    finally:
        delivery.cancel()


async def serve(listen: str, connect: str, seconds: float) -> None:
    """Until cancelled."""

    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(connect)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(_hand_on(reader, far_writer, seconds), _hand_on(far_reader, writer, seconds))
        except ConnectionError:
            pass
        finally:
            far_writer.close()
            writer.close()

    server = await asyncio.start_unix_server(met, listen)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(sys.argv[1], sys.argv[2], float(sys.argv[3])))
