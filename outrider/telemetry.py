"""Logs: one line an event, for people or as JSON. Progress of what takes long."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime

Progress = Callable[[int, int], None]
"""Told of work at a start-up: the number of its present part, from 1 on, and how many parts there are."""

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Name of the request that is being answered, for log lines."""

# What every record has; whatever else it has came as `extra` of the call.
_USUAL = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def no_progress(part: int, parts: int) -> None:
    """Progress that nobody hears of."""


def say(line: str) -> None:
    """Write a line to standard error as it is. One that cannot be written, as on a full disk, is lost."""
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


class JsonLines(logging.Formatter):
    """One JSON object an event: time, level, role, logger, message; where there are such, request_id, what the caller
    added as `extra`, and exception.
    """

    def __init__(self, role: str) -> None:
        """role: of the process."""
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            said["request_id"] = request_id
        said |= {name: value for name, value in record.__dict__.items() if name not in _USUAL}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str, ensure_ascii=False)


def setup_logging(role: str, level: str = "info", style: str = "text") -> None:
    """Send the process's logs to standard error: as `time role level message`, or as JSON (style: text, json)."""
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s {role:<7} %(levelname)-7s %(message)s"
    handler.setFormatter(JsonLines(role) if style == "json" else logging.Formatter(line, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "asyncio", "grpc", "jax", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
