"""Logs, one line an event, for people or as JSON; progress of long tasks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime

Progress = Callable[[int, int], None]
"""Receives the progress of a start-up: the number of the present part, counted from 1, and the number of parts."""

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the present request, for log lines."""

# Fields of every record; further ones are the `extra` of the logging call.
_STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def no_progress(part: int, parts: int) -> None:
    """Progress that is not reported."""


def write_line(line: str) -> None:
    """Write a line to standard error. A line that cannot be written, for example to a full disk, is lost."""
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


class JsonLines(logging.Formatter):
    """One JSON object an event: time, level, role, logger, message; if present, request_id, `extra` and exception."""

    def __init__(self, role: str) -> None:
        """role: of the process."""
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        event: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            event["request_id"] = request_id
        event |= {name: value for name, value in record.__dict__.items() if name not in _STANDARD_FIELDS}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str, ensure_ascii=False)


LOG_NAME = "OUTRIDER_LOG_NAME"  # environment variable in which a supervisor names its child


def setup_logging(role: str, level: str = "info", style: str = "text") -> None:
    """Send the process's logs to standard error: as `time role level message`, or as JSON (style: text, json).

    A replica that a supervisor started has its name in place of the role, such as target-2.
    """
    name = os.environ.get(LOG_NAME, "")
    role = name if name.rpartition("-")[0] == role else role
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s {role:<7} %(levelname)-7s %(message)s"
    handler.setFormatter(JsonLines(role) if style == "json" else logging.Formatter(line, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "asyncio", "grpc", "jax", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
