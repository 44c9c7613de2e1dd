"""What a choice says, as bodies have it: a completion's text, a chat's message, with calls and reasoning or without."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from gateway.parsers.parser import Said, Speech
from gateway.parsers.reasoning import ThinkingTokens


class Voice(ABC):
    """One choice, told piece by piece and as a whole."""

    reasoning_tokens = 0

    @abstractmethod
    def add(self, text: str, tokens: Sequence[int], *, last: bool) -> dict[str, Any] | None:
        """What a chunk says of a piece of text, which came from these tokens; None if that is nothing yet."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """What a whole answer says."""

    def reason(self, reason: str) -> str:
        """The finish reason. reason: for which the text ended."""
        return reason


class _Text(Voice):
    def __init__(self) -> None:
        self._texts: list[str] = []

    def whole_text(self) -> str:
        """All of it."""
        return "".join(self._texts)


class CompletionVoice(_Text):
    """`text`."""

    def add(self, text: str, tokens: Sequence[int], *, last: bool) -> dict[str, Any] | None:
        """As in Voice."""
        del tokens
        self._texts.append(text)
        return {"text": text} if text or last else None

    def whole(self) -> dict[str, Any]:
        """As in Voice."""
        return {"text": self.whole_text()}


class ChatVoice(_Text):
    """`message` and `delta`, of content alone."""

    def add(self, text: str, tokens: Sequence[int], *, last: bool) -> dict[str, Any] | None:
        """As in Voice."""
        del tokens
        self._texts.append(text)
        return {"delta": {"content": text} if text else {}} if text or last else None

    def whole(self) -> dict[str, Any]:
        """As in Voice."""
        return {"message": {"role": "assistant", "content": self.whole_text(), "refusal": None}}


class SpeechVoice(Voice):
    """`message` and `delta`, of reasoning, content and calls."""

    def __init__(self, speech: Speech, thinking: ThinkingTokens, *, tell_reasoning: bool, named: bool) -> None:
        """tell_reasoning: False leaves it out. named: the request named the function that is called."""
        self._speech = speech
        self._thinking = thinking
        self._tells_reasoning = tell_reasoning
        self._named = named
        self._said = Said()
        self._calls: list[dict[str, Any]] = []

    @property
    def reasoning_tokens(self) -> int:  # type: ignore[override]
        """Tokens of reasoning."""
        return self._thinking.count

    def add(self, text: str, tokens: Sequence[int], *, last: bool) -> dict[str, Any] | None:
        """As in Voice."""
        self._thinking.add(tokens)
        said = self._speech.push(text, last=last)
        self._said.content += said.content
        self._said.reasoning += said.reasoning
        delta: dict[str, Any] = {}
        if said.reasoning and self._tells_reasoning:
            delta |= {"reasoning_content": said.reasoning, "reasoning": said.reasoning}
        if said.content:
            delta["content"] = said.content
        if said.calls:
            delta["tool_calls"] = [self._call(part.call, part.name, part.arguments) for part in said.calls]
        return {"delta": delta} if delta or last else None

    def _call(self, index: int, name: str | None, arguments: str) -> dict[str, Any]:
        """A part of a call, which is noted."""
        if name is None:
            self._calls[index]["function"]["arguments"] += arguments
            return {"index": index, "function": {"arguments": arguments}}
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
        self._calls.append({**call, "function": {"name": name, "arguments": arguments}})
        return {"index": index, **call, "function": {"name": name, "arguments": arguments}}

    def whole(self) -> dict[str, Any]:
        """As in Voice."""
        content = self._said.content or (None if self._calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._said.reasoning and self._tells_reasoning:
            message |= {"reasoning_content": self._said.reasoning, "reasoning": self._said.reasoning}
        if self._calls:
            message["tool_calls"] = self._calls
        return {"message": message}

    def reason(self, reason: str) -> str:
        """As in Voice; OpenAI has `stop` where the request named the function."""
        return "tool_calls" if reason == "stop" and self._calls and not self._named else reason
