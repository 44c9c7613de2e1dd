"""The wait for the first model of a gateway, of those that its file has meanwhile."""

from __future__ import annotations

import asyncio
import logging

from gateway.process.models_reload import ModelsReload
from gateway.process.waiting import WARN_AFTER
from outrider.errors import Unavailable
from outrider.process.startup import STARTUP

log = logging.getLogger(__name__)


async def first_model(reload: ModelsReload, seconds: float) -> bool:
    """Wait until a model is served, and a little longer for the others. Returns True.

    Raises the error of a model that is the only one, and Unavailable if none of those whose targets have fixed
    addresses comes in `seconds`, which begin anew when the file is read again.
    """
    while not reload.serves_any:
        await _change(reload, seconds)
    if reload.several:
        STARTUP.done("waiting for targets")
    if coming := {start for runner, start in reload.first_starts if runner.links.any_target and not start.done()}:
        await asyncio.wait(coming, timeout=WARN_AFTER)
    for runner in reload.runners:
        if runner.served.running is None:
            log.warning("no target of the model %s is up yet; its requests get 503 until one is", runner.served.name)
    return True


async def _change(reload: ModelsReload, seconds: float) -> None:
    """Wait until a model is served, or the file was read again. Raises as `first_model`."""
    reload.changed.clear()
    changed = asyncio.create_task(reload.changed.wait())
    starts = {start for _, start in reload.first_starts}
    fixed = reload.several and all(runner.links.targets_are_fixed for runner in reload.runners)
    try:
        done, _ = await asyncio.wait(
            {changed, *starts}, timeout=seconds if fixed else None, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        changed.cancel()
    if not done:
        raise Unavailable(f"no target of any model answered in {seconds:.0f} s; is one of them running?")
    for start in done & starts:
        if not start.cancelled():  # as it is if its model has left
            start.result()
