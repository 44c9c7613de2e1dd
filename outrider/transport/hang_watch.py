"""Notices an engine that hangs: the service reports NOT_SERVING, and the process ends, so that it is restarted.

The network thread of such a process goes on answering, and its streams stay open, so sessions would wait for ever. Once
the process has ended, the gateway opens them elsewhere, or again on the restarted process, with the same text.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from collections.abc import Callable

from outrider.serving.loop import EngineLoop
from outrider.transport.rpc import GrpcServer

log = logging.getLogger(__name__)

_LAST_SECONDS = 5.0  # between the report and the end of the process, in which health checks see the report
_LOOKS = 8  # at the engine, in the time that a step may take


def _exit() -> None:
    logging.shutdown()
    os._exit(1)  # the engine thread cannot be ended


async def watch_engine(loop: EngineLoop, server: GrpcServer, limit: float, end: Callable[[], None] = _exit) -> None:
    """Watch an engine until cancelled. limit: seconds for a step; 0 watches nothing. end: ends the process."""
    reported: float | None = None
    clock = asyncio.get_running_loop().time
    while limit > 0.0:
        await asyncio.sleep(min(1.0, limit / _LOOKS))
        late = loop.late(limit)
        if late is not None and reported is None:
            reported = clock()
            log.error(
                "the engine has not finished its present step for %.0f s, which is longer than --hang-timeout %g: the "
                "service is not serving, and the process ends in %g s. What its threads do follows",
                late,
                limit,
                min(limit, _LAST_SECONDS),
            )
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
            server.set_progress(f"hangs: the engine has not finished a step for {late:.0f} s")
            await server.set_serving(False)
        elif late is None and reported is not None:
            log.warning("the engine has finished its step after all, and serves again")
            reported = None
            server.set_progress("")
            await server.set_serving(True)
        elif reported is not None and clock() - reported > min(limit, _LAST_SECONDS):
            log.error("the process ends, because its engine hangs")
            end()
