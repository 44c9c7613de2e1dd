"""Replies of SGLang's native /generate.

Each event of a stream repeats everything so far, as in SGLang, except the log-probabilities of the prompt, which are in
the first event alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.api.answers.logprobs import finite, token_logprobs
from gateway.api.answers.prompts import JsonList, slices
from gateway.api.answers.streaming import DONE
from gateway.api.requests.native import NativeRequest
from gateway.orchestration.generation import Generation, Part, merged
from gateway.text.pieces import Pieces
from outrider.speculation.proposal import FinishReason, Logprobs

_INPUT = ("input_token_logprobs", "input_top_logprobs")


@dataclass
class _Answer:
    """One answer so far."""

    request: NativeRequest
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[str, JsonList] = field(default_factory=dict)
    last: Part | None = None


class NativeReply:
    """The reply to one /generate."""

    def __init__(self, requests: Sequence[NativeRequest], pieces: Pieces, *, several: bool, texts: bool) -> None:
        """several: the reply is a list even for one answer. texts: log-probabilities include the tokens' texts."""
        self._answers = [_Answer(request) for request in requests]
        self._pieces = pieces
        self._several = several or len(requests) > 1
        self._texts = texts

    async def whole(self, generations: Sequence[Generation]) -> bytes:
        """As in Reply."""
        async for index, part in merged(generations):
            await self._add(self._answers[index], part)
        bodies = [
            self._body(answer, generation.seed) for answer, generation in zip(self._answers, generations, strict=True)
        ]
        return orjson.dumps(bodies if self._several else bodies[0])

    async def events(self, generations: Sequence[Generation]) -> AsyncIterator[bytes]:
        """As in Reply: an event per commit, up to [DONE]."""
        async for index, part in merged(generations):
            answer = self._answers[index]
            await self._add(answer, part)
            body = self._body(answer, generations[index].seed) | ({"index": index} if self._several else {})
            yield b"data: " + orjson.dumps(body) + b"\n\n"
            for name in _INPUT:
                answer.logprobs.pop(name, None)
        yield DONE

    async def _add(self, answer: _Answer, part: Part) -> None:
        start = answer.request.logprob_start
        if start is not None and answer.last is None:
            await self._add_prompt_logprobs(answer, start, part.prompt_logprobs)
        if part.logprobs is not None:
            self._add_logprobs(answer, "output", part.tokens, part.logprobs)
        answer.text += part.text
        answer.tokens += part.tokens
        answer.last = part

    async def _add_prompt_logprobs(self, answer: _Answer, start: int, logprobs: Logprobs | None) -> None:
        """Add those from position `start` on; the first one is null, as in SGLang."""
        prompt = answer.request.request.prompt[start:]
        _list(answer, "input_token_logprobs").extend([self._entry(prompt[0], None)])
        if answer.request.request.prompt_logprobs:
            _list(answer, "input_top_logprobs").extend([None])
        async for tokens, part in slices(prompt, None if logprobs is None else logprobs.behind(start)):
            self._add_logprobs(answer, "input", tokens, part)

    def _add_logprobs(self, answer: _Answer, side: str, tokens: Sequence[int], logprobs: Logprobs) -> None:
        entries = token_logprobs(tokens, logprobs)
        _list(answer, f"{side}_token_logprobs").extend([self._entry(token, value) for token, value, _ in entries])
        if answer.request.request.logprobs:
            best = [[self._entry(*pair) for pair in top] for _, _, top in entries]
            _list(answer, f"{side}_top_logprobs").extend(best)

    def _entry(self, token: int, logprob: float | None) -> list[Any]:
        value = None if logprob is None else finite(logprob)
        return [value, token, self._pieces.text(token) if self._texts else None]

    def _body(self, answer: _Answer, seed: int) -> dict[str, Any]:
        part = answer.last
        assert part is not None, "called after the first part"
        info: dict[str, Any] = {
            "id": answer.request.id,
            "finish_reason": _finish_reason(part),
            "prompt_tokens": part.prompt_tokens,
            "completion_tokens": part.completion_tokens,
            "cached_tokens": part.cached_tokens,
            "weight_version": part.weight_version,
            "sampling_seed": seed,
        }
        if answer.request.request.logprobs is not None:
            info |= {"input_token_logprobs": [], "output_token_logprobs": []}
            info |= {name: entries.fragment() for name, entries in answer.logprobs.items()}
        if part.report is not None:
            info |= {"e2e_latency": part.report.first_seconds + part.report.decode_seconds, **part.report.meta_info()}
        return {"text": answer.text, "output_ids": answer.tokens, "meta_info": info}


def _list(answer: _Answer, name: str) -> JsonList:
    return answer.logprobs.setdefault(name, JsonList())


def _finish_reason(part: Part) -> dict[str, Any] | None:
    match part.finish:
        case FinishReason.STOP:
            return {"type": "stop", "matched": part.matched}
        case FinishReason.LENGTH:
            return {"type": "length", "length": part.completion_tokens}
        case FinishReason.ABORT:
            return {"type": "abort", "message": "the request was aborted"}
    return None
