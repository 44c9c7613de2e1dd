"""Choice formats: a completion's text, or a chat's message with or without reasoning and tool calls."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from gateway.parsers.output import OutputParser, ParsedOutput
from gateway.parsers.reasoning import ReasoningTokenCounter
from outrider.speculation.proposal import FinishReason


class ChoiceFormat(ABC):
    """Formats one choice, as chunks and as a whole."""

    reasoning_tokens = 0

    @abstractmethod
    def add(self, text: str, tokens: Sequence[int], finish: FinishReason) -> dict[str, Any] | None:
        """The fields of a chunk with a piece of text and its tokens; None if there is nothing to send yet.

        finish: RUNNING unless it is the last piece
        """

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The fields of the whole choice."""

    def finish_reason(self, reason: str) -> str:
        """The choice's finish reason. reason: that of its text."""
        return reason


class _Text(ChoiceFormat):
    def __init__(self) -> None:
        self._texts: list[str] = []

    def whole_text(self) -> str:
        """The text so far."""
        return "".join(self._texts)


class CompletionFormat(_Text):
    """`text`."""

    def add(self, text: str, tokens: Sequence[int], finish: FinishReason) -> dict[str, Any] | None:
        """As in ChoiceFormat."""
        del tokens
        self._texts.append(text)
        return {"text": text} if text or finish else None

    def whole(self) -> dict[str, Any]:
        """As in ChoiceFormat."""
        return {"text": self.whole_text()}


class ChatFormat(_Text):
    """`message` and `delta` with content only."""

    def add(self, text: str, tokens: Sequence[int], finish: FinishReason) -> dict[str, Any] | None:
        """As in ChoiceFormat."""
        del tokens
        self._texts.append(text)
        return {"delta": {"content": text} if text else {}} if text or finish else None

    def whole(self) -> dict[str, Any]:
        """As in ChoiceFormat."""
        return {"message": {"role": "assistant", "content": self.whole_text(), "refusal": None}}


class ParsedChatFormat(ChoiceFormat):
    """`message` and `delta` with reasoning, content and tool calls."""

    def __init__(
        self, parser: OutputParser, counter: ReasoningTokenCounter | None, *, include_reasoning: bool, named: bool
    ) -> None:
        """counter: None without reasoning. include_reasoning: False omits it. named: the request named the function."""
        self._parser = parser
        self._counter = counter
        self._include_reasoning = include_reasoning
        self._named = named
        self._output = ParsedOutput()
        self._calls: list[dict[str, Any]] = []

    @property
    def reasoning_tokens(self) -> int:  # type: ignore[override]
        """Tokens of reasoning."""
        return 0 if self._counter is None else self._counter.count

    def add(self, text: str, tokens: Sequence[int], finish: FinishReason) -> dict[str, Any] | None:
        """As in ChoiceFormat."""
        if self._counter is not None:
            self._counter.add(tokens)
        output = self._parser.push(text, last=bool(finish), cut=finish is not FinishReason.STOP)
        self._output.content += output.content
        self._output.reasoning += output.reasoning
        delta: dict[str, Any] = {}
        if output.reasoning and self._include_reasoning:
            delta |= {"reasoning_content": output.reasoning, "reasoning": output.reasoning}
        if output.content:
            delta["content"] = output.content
        if output.calls:
            delta["tool_calls"] = [self._call(part.call, part.name, part.arguments) for part in output.calls]
        return {"delta": delta} if delta or finish else None

    def _call(self, index: int, name: str | None, arguments: str) -> dict[str, Any]:
        """A part of a call for a chunk; also added to the whole choice."""
        if name is None:
            self._calls[index]["function"]["arguments"] += arguments
            return {"index": index, "function": {"arguments": arguments}}
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
        self._calls.append({**call, "function": {"name": name, "arguments": arguments}})
        return {"index": index, **call, "function": {"name": name, "arguments": arguments}}

    def whole(self) -> dict[str, Any]:
        """As in ChoiceFormat."""
        content = self._output.content or (None if self._calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._output.reasoning and self._include_reasoning:
            message |= {"reasoning_content": self._output.reasoning, "reasoning": self._output.reasoning}
        if self._calls:
            message["tool_calls"] = self._calls
        return {"message": message}

    def finish_reason(self, reason: str) -> str:
        """As in ChoiceFormat. As in OpenAI's API, `stop` if the request named the function."""
        return "tool_calls" if reason == "stop" and self._calls and not self._named else reason
