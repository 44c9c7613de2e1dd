"""The request id and the timeout of an HTTP request."""

from __future__ import annotations

import math

from fastapi import Request

from outrider.errors import InvalidRequest

REQUEST_ID = "outrider.request_id"  # key of the ASGI scope, set by the middleware
TIMEOUT = "x-request-timeout"  # header, in seconds


def timeout_of(request: Request) -> float | None:
    """Seconds that the client allows for the answer, by header. Raises InvalidRequest."""
    given = request.headers.get(TIMEOUT)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"{TIMEOUT} must be a number of seconds above 0, not {given}", param=TIMEOUT)
    return seconds
