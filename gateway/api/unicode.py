"""Texts that are no Unicode are refused: JSON can name half of a character, `"\ud83d"`, which nothing can encode.

A client sends that where it has cut a text within a character of two such halves, as JavaScript counts them.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import Depends, Request

from outrider.errors import InvalidRequest

_ESCAPES = b"\\ud", b"\\uD"  # with which halves begin, those of whole characters, too


async def _check(request: Request) -> None:
    body = await request.body()
    if not any(escape in body for escape in _ESCAPES):
        return
    try:
        content = json.loads(body)
    except ValueError:
        return  # it is said elsewhere what is wrong with it
    if not _is_whole(content):
        place = _place_of_half(content)
        raise InvalidRequest(
            f"{place or 'a key'} has half of a character, which is no Unicode; send all of it", param=place
        )


WHOLE = Depends(_check)
"""For routes whose bodies are JSON. Raises InvalidRequest."""


def _is_whole(content: Any) -> bool:
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _place_of_half(content: Any) -> str | None:
    """The innermost field that is not whole, such as messages.0.content; None if that is a text or a key itself."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        if _is_whole(key) and not _is_whole(value):
            place = _place_of_half(value)
            return str(key) if place is None else f"{key}.{place}"
    return None
