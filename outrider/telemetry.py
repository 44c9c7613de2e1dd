"""Logs: one readable line an event, the process's role in front. Progress of what takes long."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Told of work at a start-up: the number of its present part, from 1 on, and how many parts there are."""


def untold(part: int, parts: int) -> None:
    """Progress that nobody hears of."""


def setup_logging(role: str, level: str = "info") -> None:
    """Send the process's logs to standard error, as `time role level message`."""
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s {role:<7} %(levelname)-7s %(message)s"
    handler.setFormatter(logging.Formatter(line, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "asyncio", "grpc", "jax", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
