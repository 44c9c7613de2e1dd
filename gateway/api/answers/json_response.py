"""Answers in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import Response


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Content as JSON, with an HTTP status."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")
