"""Texts that are no Unicode are refused: JSON can name half of a character, `"\\ud83d"`, which nothing can encode.

A client sends that where it has cut a text within a character of two such halves, as JavaScript counts them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fastapi import Depends, Request

from outrider.errors import InvalidRequest

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # one, maybe of a whole character; behind a backslash, maybe none


async def _check(request: Request) -> None:
    body = await request.body()
    # Other encodings of JSON than UTF-8 are read, too, and write escapes in other bytes.
    if json.detect_encoding(body).startswith("utf-8") and _HALF.search(body) is None:
        return
    try:
        content = await request.json()
        whole = _is_whole(json.dumps(content, ensure_ascii=False))
    except ValueError:
        return  # it is said elsewhere what is wrong with it
    if not whole:
        place = _place_of_half(content)
        raise InvalidRequest(
            f"{place or 'a key'} has half of a character, which is no Unicode; send all of it", param=place
        )


WHOLE = Depends(_check)
"""For routes whose bodies are JSON. Raises InvalidRequest."""


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _place_of_half(content: Any) -> str | None:
    """The first field whose text is not whole, such as messages.0.content, or in which such a key stands; None if none.

    In one pass, whatever stands within what: bodies are large, and this is the event loop's thread.
    """
    if isinstance(content, str):
        return None
    open_ones = [("", _entries(content))]  # containers that stand within one another, by their keys

    def place(*key: str) -> str | None:
        return ".".join([*(outer for outer, _ in open_ones[1:]), *key]) or None

    while open_ones:
        for key, value in open_ones[-1][1]:
            if not _is_whole(key):
                return place()
            if isinstance(value, str):
                if not _is_whole(value):
                    return place(key)
            elif isinstance(value, dict | list):
                open_ones.append((key, _entries(value)))
                break
        else:
            open_ones.pop()
    return None


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        return iter(content.items())
    return ((str(i), value) for i, value in enumerate(content))
