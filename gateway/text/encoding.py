"""Prompts become tokens, and tokens texts; in a thread, where that takes long, for commits must not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import Any, TypeVar

from gateway.text.tokenizer import ModelTokenizer
from outrider.errors import InvalidRequest
from outrider.text.tokenizer import LONG_TEXT

Result = TypeVar("Result")

# Messages of a conversation, with parts of their contents and calls. More of them, whatever they say, would take too
# much of the event loop's time, in which nobody else is answered (16384 calls take 0.2 s).
MAX_PIECES = 1 << 14

_MARKS = 4  # characters around a piece of a conversation
_MANY = 64  # pieces of work that take long whatever their length


async def encode_all(
    tokenizer: ModelTokenizer, prompts: Sequence[str | list[int]], *, special: bool = True
) -> list[list[int]]:
    """Tokens of raw prompts, in one thread if at all; of those that are tokens, themselves. special: as of encode."""

    def encoded() -> list[list[int]]:
        return [tokenizer.encode(one, special=special) if isinstance(one, str) else one for one in prompts]

    return await worked([one for one in prompts if isinstance(one, str)], encoded)


async def encode_chat(
    tokenizer: ModelTokenizer, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[int]:
    """Tokens of a conversation. options: as of encode_chat. Raises InvalidRequest."""
    # Templates render calls, tools and whatever else they are told, too.
    work = partial(tokenizer.encode_chat, messages, **options)
    return await asyncio.to_thread(work) if _is_long([messages, options]) else work()


def cut(prompt: list[int], length: int | None, room: int) -> list[int]:
    """The last tokens of a prompt: so many, with -1 as many as fit, and with None all of it. Raises InvalidRequest.

    room: what the context has beside the answer, in tokens
    """
    if length is None:
        return prompt
    if length == -1:
        length = max(room, 1)
    if length < 1:
        raise InvalidRequest("truncate_prompt_tokens must be -1, or 1 or more", param="truncate_prompt_tokens")
    return prompt[-length:]


def _is_long(content: Any) -> bool:
    """True if a conversation is long in all, with keys and marks; no more of it is looked at."""
    left, rest = LONG_TEXT, [content]
    while rest and left > 0:
        value = rest.pop()
        left -= _MARKS + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, Mapping):
            rest += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            rest += value
    return left <= 0


async def worked(material: Sequence[Sized], work: Callable[[], Result]) -> Result:
    """What work with some material gives; in a thread, if that is long. material: texts, or lists of tokens."""
    if len(material) >= _MANY or sum(map(len, material)) >= LONG_TEXT:
        return await asyncio.to_thread(work)
    return work()
