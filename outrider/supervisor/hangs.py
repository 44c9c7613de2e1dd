"""Notices a process that hangs as a whole, such as one that was stopped: it does not answer health checks.

A service whose engine alone hangs answers, reports it, and ends by itself (outrider/transport/hang_watch.py).
"""

from __future__ import annotations

import asyncio

from outrider.supervisor.health import status_of

SILENT_SECONDS = 60.0
"""Time without an answer after which a process that was ready hangs."""

_LOADING_FACTOR = 5.0  # times as long before it was ready: imports and compilers can hold Python's lock for long
_CHECKS = 12  # in SILENT_SECONDS; one of them is not enough, because the supervisor may have been stopped itself
_LEAST_SILENT = 3  # checks in a row without an answer


async def until_silent(address: str, seconds: float) -> float:
    """Return once a process has not answered for `seconds`, and how long it has not.

    A process that has never answered may take any time: it may be fetching a model. address: for health checks
    """
    clock = asyncio.get_running_loop().time
    answered = ready = False
    silent, since = 0, 0.0
    while True:
        await asyncio.sleep(seconds / _CHECKS)
        asked = clock()
        status = await status_of(address, min(2.0, seconds / _LEAST_SILENT))
        if status is not None:
            answered, ready, silent = True, ready or status, 0
            continue
        since = since if silent else asked
        silent += 1
        limit = seconds if ready else seconds * _LOADING_FACTOR
        if answered and silent >= _LEAST_SILENT and clock() - since > limit:
            return clock() - since
