"""Attempts to load the drafters: a draft that cannot be loaded is tried again, and the process keeps answering why.

The target decodes plainly meanwhile. A repeated attempt in the process costs less than a restarted process, and the
gateway receives the reason.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from outrider.errors import OutriderError
from outrider.process.backoff import Backoff

log = logging.getLogger(__name__)

BACKOFF = Backoff(first=1.0, longest=30.0, jitter=0.2)

Loaded = TypeVar("Loaded")


def load_with_retries(
    load: Callable[[], Loaded], report: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> Loaded:
    """What `load` returns, once it succeeds. report: called with the reason of each failure. sleep: waits seconds."""
    waits, last = BACKOFF.waits(), ""
    while True:
        try:
            return load()
        except Exception as error:  # of libraries, too, for instance for a damaged file or a full device
            reason = reason_of(error)
            wait = next(waits)
            log.log(
                logging.ERROR if reason != last else logging.DEBUG,
                "the draft cannot be loaded: %s. The target decodes plainly; attempts go on, the next one in %.0f s. "
                "With --require-draft this is an error",
                reason,
                wait,
                exc_info=None if isinstance(error, OutriderError) or reason == last else error,
            )
            report(reason)
            last = reason
        gc.collect()  # weights of the failed attempt
        sleep(wait)


def reason_of(error: Exception) -> str:
    """Why loading failed, on one line, with what to do if that is known."""
    if isinstance(error, OutriderError):
        return error.message
    if isinstance(error, ModuleNotFoundError):
        return f'{error.name} is not installed; run `make install`, or `pip install "outrider[draft]"`'
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
