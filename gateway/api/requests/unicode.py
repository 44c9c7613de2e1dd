"""Refuses bodies with lone surrogates, such as `"\\ud83d"`: JSON allows them, but they cannot be encoded as UTF-8.

Clients send them after cutting a text between the two UTF-16 code units of a character, as JavaScript counts them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fastapi import Depends, Request

from outrider.errors import InvalidRequest

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # may be half of a valid pair, or an escaped backslash


async def _check(request: Request) -> None:
    body = await request.body()
    # Bodies in UTF-16 and UTF-32 are accepted as well; the pattern does not match their escapes.
    if json.detect_encoding(body).startswith("utf-8") and _SURROGATE.search(body) is None:
        return
    try:
        content = await request.json()
        valid = is_valid(json.dumps(content, ensure_ascii=False))
    except ValueError:
        return  # invalid JSON is reported elsewhere
    if not valid:
        path = surrogate_path(content)
        raise InvalidRequest(
            f"{path or 'a key'} has half of a character, which is no Unicode; send all of it", param=path
        )


VALID_UNICODE = Depends(_check)
"""A dependency of routes with JSON bodies. Raises InvalidRequest."""


def is_valid(text: str) -> bool:
    """True if a text can be encoded, because it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def surrogate_path(content: Any) -> str | None:
    """Path of the first text with a lone surrogate, such as messages.0.content, or of the object with such a key.

    None if there is no path. Iterative and in one pass, because bodies are large and deep, and this blocks the event
    loop.
    """
    if isinstance(content, str):
        return None
    containers = [("", _entries(content))]  # the present container and those around it, with their keys

    def path(*key: str) -> str | None:
        return ".".join([*(outer for outer, _ in containers[1:]), *key]) or None

    while containers:
        for key, value in containers[-1][1]:
            if not is_valid(key):
                return path()
            if isinstance(value, str):
                if not is_valid(value):
                    return path(key)
            elif isinstance(value, dict | list):
                containers.append((key, _entries(value)))
                break
        else:
            containers.pop()
    return None


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        return iter(content.items())
    return ((str(i), value) for i, value in enumerate(content))
