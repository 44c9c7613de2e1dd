"""The output parser: splits a choice's growing text into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.parsers.base import CallParser, CallPart
from gateway.parsers.reasoning import END, Reasoning
from gateway.parsers.tool_calls import (
    DEEPSEEK_MARKERS,
    HERMES_MARKERS,
    PYTHON_TAG,
    DeepSeekParser,
    HermesParser,
    JsonCallsParser,
)
from outrider.config import ReasoningParser, ToolCallParser

CallFormat = Literal["hermes", "llama", "deepseek"]

_FORMATS: dict[ToolCallParser, CallFormat] = {
    "hermes": "hermes", "qwen25": "hermes", "llama3": "llama", "deepseekv3": "deepseek",
}  # fmt: skip
MARKERS: dict[CallFormat, Sequence[str]] = {
    "hermes": HERMES_MARKERS, "llama": (PYTHON_TAG,), "deepseek": DEEPSEEK_MARKERS,
}  # fmt: skip


@dataclass
class ParsedOutput:
    """Reasoning, content and parts of calls."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class OutputParser:
    """Parses one choice's text piece by piece."""

    def __init__(self, reasoning: Reasoning | None, calls: CallParser | None, *, max_calls: int | None = None) -> None:
        """None: the text has no such part. max_calls: further calls are dropped."""
        self._reasoning = reasoning
        self._calls = calls
        self._max_calls = max_calls

    def push(self, text: str, *, last: bool, cut: bool = False) -> ParsedOutput:
        """The output that a piece of text adds. last: it is the last piece. cut: the text does not end by itself."""
        output = ParsedOutput(content=text)
        if self._reasoning is not None:
            output.reasoning, output.content = self._reasoning.push(text)
            if last:
                reasoning, content = self._reasoning.finish(cut=cut)
                output.reasoning += reasoning
                output.content += content
        if self._calls is not None:
            text, output.content = output.content, ""
            deltas = [self._calls.push(text)] if text else []
            deltas += [self._calls.finish()] if last else []
            for delta in deltas:
                output.content += delta.content
                output.calls += [part for part in delta.calls if self._allowed(part)]
        return output

    def _allowed(self, part: CallPart) -> bool:
        return self._max_calls is None or part.call < self._max_calls


def call_format(parser: ToolCallParser, template: str | None) -> CallFormat | None:
    """The format in which a model writes tool calls, by flag or by its chat template; None if it writes none."""
    if parser == "none":
        return None
    if parser != "auto":
        return _FORMATS[parser]
    if template is None or "tools" not in template:
        return None
    if DEEPSEEK_MARKERS[0] in template:
        return "deepseek"
    return "hermes" if HERMES_MARKERS[0] in template else "llama"


def call_parser(form: CallFormat, names: Collection[str]) -> CallParser:
    """A parser of a format. names: of the tools."""
    match form:
        case "hermes":
            return HermesParser()
        case "deepseek":
            return DeepSeekParser()
        case "llama":
            return JsonCallsParser(names)


def has_reasoning(parser: ReasoningParser, template: str | None) -> bool:
    """True if a model's texts may begin with reasoning."""
    return parser not in ("auto", "none") or (parser == "auto" and template is not None and END in template)
