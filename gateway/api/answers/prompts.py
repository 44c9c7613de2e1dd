"""Log-probabilities of prompts as JSON, built a few tokens at a time, so that other streams go on meanwhile.

A prompt may have a million of them. Each slice is serialized at once: bytes take a tenth of the memory of Python
objects, and are only copied when the reply is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from gateway.api.answers.logprobs import LogprobFormatter, joined, prompt_entries
from gateway.text.pieces import Pieces
from outrider.speculation.proposal import Logprobs

_SLICE_ENTRIES = 1024  # log-probabilities between two turns of the event loop; they take about a millisecond


class JsonList:
    """A list that is kept as JSON."""

    def __init__(self) -> None:
        self._content = bytearray(b"[")

    def extend(self, items: Sequence[Any]) -> None:
        """Append serializable items."""
        if items:
            if len(self._content) > 1:
                self._content += b","
            self._content += orjson.dumps(items)[1:-1]

    def fragment(self) -> orjson.Fragment:
        """The list, to be written into other JSON."""
        return orjson.Fragment(bytes(self._content) + b"]")


async def slices(tokens: Sequence[int], logprobs: Logprobs | None) -> AsyncIterator[tuple[Sequence[int], Logprobs]]:
    """A prompt's tokens but the first, a few at a time, with their log-probabilities. Other coroutines run in between.

    logprobs: of all tokens but the first; None for a prompt of one token
    """
    if logprobs is None:
        return
    size = max(1, _SLICE_ENTRIES // (1 + logprobs.top_tokens.shape[1]))
    for start in range(0, len(logprobs), size):
        part = logprobs.behind(start).until(size)
        yield tokens[1 + start : 1 + start + len(part)], part
        await asyncio.sleep(0)


async def entries(pieces: Pieces, tokens: Sequence[int], logprobs: Logprobs | None) -> orjson.Fragment:
    """vLLM's `prompt_logprobs`; see prompt_entries."""
    result = JsonList()
    result.extend([None])
    async for part, values in slices(tokens, logprobs):
        result.extend(prompt_entries(pieces, part, values))
    return result.fragment()


async def echoed(formatter: LogprobFormatter, tokens: Sequence[int], logprobs: Logprobs | None) -> dict[str, Any]:
    """`logprobs` of a prompt that an answer echoes."""
    parts = [formatter.first(tokens[0])]
    async for part, values in slices(tokens, logprobs):
        parts.append(serialized(formatter.part(part, values)))
    return joined(parts)


def serialized(logprobs: dict[str, Any]) -> dict[str, Any]:
    """`logprobs` whose lists have their objects as JSON."""
    return {
        key: [orjson.Fragment(orjson.dumps(one)) if isinstance(one, dict) else one for one in value]
        if isinstance(value, list)
        else value
        for key, value in logprobs.items()
    }
