"""Prompts to tokens and tokens to texts, in a thread if that takes long, so that commits are not delayed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import Any, TypeVar

from gateway.text.tokenizer import ModelTokenizer
from outrider.errors import InvalidRequest
from outrider.text.tokenizer import LONG_TEXT

Result = TypeVar("Result")

# Messages of a conversation, with the parts of their contents and calls. More of them would block the event loop for
# too long, whatever their length (16384 calls take 0.2 s).
MAX_PIECES = 1 << 14

_PIECE_OVERHEAD = 4  # characters around a piece of a conversation
_MANY_ITEMS = 64  # items that take long however short they are


async def encode(tokenizer: ModelTokenizer, text: str, *, special: bool = True) -> list[int]:
    """Tokens of a raw prompt. special: add the special tokens that the tokenizer puts around a text."""
    (tokens,) = await encode_all(tokenizer, [text], special=special)
    return tokens


async def encode_all(
    tokenizer: ModelTokenizer, prompts: Sequence[str | list[int]], *, special: bool = True
) -> list[list[int]]:
    """Tokens of raw prompts; prompts that are tokens stay as they are. special: as in encode."""

    def encoded() -> list[list[int]]:
        return [tokenizer.encode(one, special=special) if isinstance(one, str) else one for one in prompts]

    return await run_in_thread_if_long([one for one in prompts if isinstance(one, str)], encoded)


async def encode_chat(
    tokenizer: ModelTokenizer, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None
) -> list[int]:
    """Tokens of a conversation. options: variables of the chat template. Raises InvalidRequest."""
    # Templates also render calls, tools and all other variables, so these count as well.
    work = partial(tokenizer.encode_chat, messages, **(options or {}))
    return await asyncio.to_thread(work) if _is_long([messages, options]) else work()


def cut(prompt: list[int], length: int | None, room: int) -> list[int]:
    """The last `length` tokens of a prompt; with -1 as many as fit, with None all. Raises InvalidRequest.

    room: tokens of the context beside the answer
    """
    if length is None:
        return prompt
    if length == -1:
        length = max(room, 1)
    if length < 1:
        raise InvalidRequest("truncate_prompt_tokens must be -1, or 1 or more", param="truncate_prompt_tokens")
    return prompt[-length:]


def _is_long(content: Any) -> bool:
    """True if a conversation is long, counted with keys and overhead; reads no more than that needs."""
    left, rest = LONG_TEXT, [content]
    while rest and left > 0:
        value = rest.pop()
        left -= _PIECE_OVERHEAD + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, Mapping):
            rest += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            rest += value
    return left <= 0


async def run_in_thread_if_long(material: Sequence[Sized], work: Callable[[], Result]) -> Result:
    """The result of work on some texts or lists of tokens; in a thread if they are long or many."""
    if len(material) >= _MANY_ITEMS or sum(map(len, material)) >= LONG_TEXT:
        return await asyncio.to_thread(work)
    return work()
