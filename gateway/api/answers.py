"""Bodies of answers: whole ones, and the chunks of a stream, one for each commit.

A chunk's frame is the same from the first to the last but for its choice, so it is serialized once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from gateway.generation import Generation, Part, merged
from outrider.speculation.proposal import FinishReason

DONE = b"data: [DONE]\n\n"
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "stop"}


class Kind(ABC):
    """Names and shapes in which chats and completions differ."""

    def __init__(self, prefix: str, whole: str, chunk: str) -> None:
        self.prefix, self.whole, self.chunk = prefix, whole, chunk

    @abstractmethod
    def choice(self, text: str) -> dict[str, Any]:
        """What a whole answer says."""

    @abstractmethod
    def delta(self, text: str) -> dict[str, Any]:
        """What a chunk adds."""

    @abstractmethod
    def opening(self) -> dict[str, Any] | None:
        """What the first chunk of a choice says, if it is one of its own."""


class _Chat(Kind):
    def choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}


class _Completion(Kind):
    def choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def opening(self) -> None:
        return None


CHAT: Kind = _Chat("chatcmpl-", "chat.completion", "chat.completion.chunk")
COMPLETION: Kind = _Completion("cmpl-", "text_completion", "text_completion")


class Answer:
    """One answer under way, of one or more choices. Whoever makes it must close it."""

    def __init__(
        self,
        kind: Kind,
        generations: Sequence[Generation],
        *,
        request_id: str,
        model: str,
        fingerprint: str,
        per_prompt: int = 1,
        ids: bool = False,
    ) -> None:
        """model: the name that is served. per_prompt: choices that share a prompt. ids: tell token ids, too."""
        self.kind = kind
        self.id = kind.prefix + request_id
        self._head = {"id": self.id, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._generations = generations
        self._per_prompt = per_prompt
        self._ids = ids
        self._last: dict[int, Part] = {}

    def close(self) -> None:
        """Free the sessions."""
        for generation in self._generations:
            generation.close()

    async def whole(self) -> bytes:
        """The answer as one body."""
        texts: list[list[str]] = [[] for _ in self._generations]
        tokens: list[list[int]] = [[] for _ in self._generations]
        async for index, part in merged(self._generations):
            texts[index].append(part.text)
            tokens[index] += part.tokens
            self._last[index] = part
        choices = []
        for index, pieces in enumerate(texts):
            reason = _REASONS[self._last[index].finish]
            choice = {"index": index, **self.kind.choice("".join(pieces)), "logprobs": None, "finish_reason": reason}
            choices.append(choice | ({"token_ids": tokens[index]} if self._ids else {}))
        return orjson.dumps({**self._head, "object": self.kind.whole, "choices": choices, "usage": self.usage()})

    async def events(self, *, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as server-sent events, up to [DONE]. Raises the error that ends it."""
        head = {**self._head, "object": self.kind.chunk}
        before = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        async for index, part in merged(self._generations):
            if index not in self._last and (opening := self.kind.opening()) is not None:
                yield before + self._choice(index, opening, None, []) + after
            self._last[index] = part
            if part.text or part.finish or self._ids:
                yield before + self._choice(index, self.kind.delta(part.text), part.finish, part.tokens) + after
        if include_usage:
            yield b"data: " + orjson.dumps({**head, "choices": [], "usage": self.usage()}) + b"\n\n"
        yield DONE

    def _choice(self, index: int, content: dict[str, Any], finish: FinishReason | None, tokens: Sequence[int]) -> bytes:
        reason = _REASONS[finish] if finish else None
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        return orjson.dumps(choice | ({"token_ids": list(tokens)} if self._ids else {}))

    def usage(self) -> dict[str, Any]:
        """Tokens of all choices; a prompt counts once, however many choices it has."""
        parts = self._last.values()
        first = [part for index, part in self._last.items() if index % self._per_prompt == 0]
        prompt = sum(part.prompt_tokens for part in first)
        completion = sum(part.completion_tokens for part in parts)
        accepted = sum(part.accepted for part in parts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(part.cached_tokens for part in first), "audio_tokens": 0},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(part.verified for part in parts) - accepted,
                "reasoning_tokens": 0,
            },
        }
