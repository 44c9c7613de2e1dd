"""Logs: one readable line an event, the process's role in front."""

from __future__ import annotations

import logging
import sys


def setup_logging(role: str, level: str = "info") -> None:
    """Send the process's logs to standard error, as `time role level message`."""
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s {role:<7} %(levelname)-7s %(message)s"
    handler.setFormatter(logging.Formatter(line, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "asyncio", "grpc", "jax", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
