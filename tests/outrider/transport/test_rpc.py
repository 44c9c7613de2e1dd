"""What a service waits for after a signal to stop."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from outrider.transport.rpc import sessions_gone


@pytest.mark.parametrize(
    ("sessions", "limit", "event", "seconds"),
    [
        (0, 60, None, (0, 0.05)),
        (2, 0, None, (0, 0.05)),
        (2, 0.2, None, (0.2, 1)),
        (2, 60, "they move", (0.2, 1)),
        (2, 60, "a second signal", (0.2, 1)),
    ],
)
async def test_a_service_stops_when_its_sessions_have_gone_or_had_their_time(sessions, limit, event, seconds):
    hub, stop = SimpleNamespace(sessions=sessions), asyncio.Event()
    stop.set()  # the first signal

    def happen():
        if event == "they move":
            hub.sessions = 0
        elif event == "a second signal":
            stop.set()

    asyncio.get_running_loop().call_later(0.2, happen)
    start = time.monotonic()
    await sessions_gone(hub, stop, limit)
    assert seconds[0] <= time.monotonic() - start < seconds[1]
