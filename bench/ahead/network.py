"""The network between gateway and draft service: a proxy in this process, whose delay can be changed while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from bench.scale.delay import serve


class Delay:
    """seconds: one way, of what is sent from now on."""

    def __init__(self) -> None:
        self.seconds = 0.0


@contextlib.contextmanager
def delayed(listen: Path, connect: Path) -> Iterator[Delay]:
    """A delayed way between two Unix sockets, in a thread of its own."""
    delay, stop, running = Delay(), asyncio.Event(), threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def network() -> None:
        loops.append(asyncio.get_running_loop())
        server = asyncio.create_task(serve(str(listen), str(connect), lambda: delay.seconds))
        running.set()
        await stop.wait()
        server.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(network()), name="network", daemon=True)
    thread.start()
    running.wait()
    try:
        yield delay
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join()
