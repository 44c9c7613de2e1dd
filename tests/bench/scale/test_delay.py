"""The simulated network delay."""

import asyncio
import time

import numpy as np

from bench.scale.delay import serve


def test_bytes_arrive_in_order_and_delayed(tmp_path):
    near, far, delay = str(tmp_path / "near"), str(tmp_path / "far"), 0.05

    async def echo(reader, writer):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
        writer.close()

    async def talk():
        server = await asyncio.start_unix_server(echo, far)
        network = asyncio.create_task(serve(near, far, lambda: delay))
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_unix_connection(near)
        sent = np.random.default_rng(0).bytes(1 << 20)
        start = time.monotonic()
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
        assert time.monotonic() - start >= 2 * delay
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent
        writer.close()
        network.cancel()
        server.close()

    asyncio.run(talk())
