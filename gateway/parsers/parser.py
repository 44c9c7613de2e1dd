"""A choice's text as reasoning, content and calls, as far as it has come; and which form a model writes calls in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.parsers.base import CallPart, CallReader
from gateway.parsers.reasoning import END, Reasoning
from gateway.parsers.tool_calls import (
    DEEPSEEK_MARKS,
    HERMES_MARKS,
    PYTHON_TAG,
    DeepSeekReader,
    HermesReader,
    ObjectsReader,
)
from outrider.config import ReasoningParser, ToolCallParser

Form = Literal["hermes", "llama", "deepseek"]

_FORMS: dict[ToolCallParser, Form] = {
    "hermes": "hermes", "qwen25": "hermes", "llama3": "llama", "deepseekv3": "deepseek",
}  # fmt: skip
MARKS: dict[Form, Sequence[str]] = {"hermes": HERMES_MARKS, "llama": (PYTHON_TAG,), "deepseek": DEEPSEEK_MARKS}


@dataclass
class Said:
    """Reasoning, content and parts of calls."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class Speech:
    """Takes one choice's text apart."""

    def __init__(self, reasoning: Reasoning | None, calls: CallReader | None, *, most_calls: int | None = None) -> None:
        """None: there is none of it. most_calls: further ones are left out."""
        self._reasoning = reasoning
        self._calls = calls
        self._most_calls = most_calls

    def push(self, text: str, *, last: bool) -> Said:
        """What a piece of text adds. last: there will be no more."""
        said = Said(content=text)
        if self._reasoning is not None:
            said.reasoning, said.content = self._reasoning.push(text)
            if last:
                reasoning, content = self._reasoning.finish()
                said.reasoning += reasoning
                said.content += content
        if self._calls is not None:
            text, said.content = said.content, ""
            deltas = [self._calls.push(text)] if text else []
            deltas += [self._calls.finish()] if last else []
            for delta in deltas:
                said.content += delta.content
                said.calls += [part for part in delta.calls if self._wanted(part)]
        return said

    def _wanted(self, part: CallPart) -> bool:
        return self._most_calls is None or part.call < self._most_calls


def form_of(parser: ToolCallParser, template: str | None) -> Form | None:
    """The form in which a model writes calls: as the flag says, or as its chat template looks; None if in none."""
    if parser == "none":
        return None
    if parser != "auto":
        return _FORMS[parser]
    if template is None or "tools" not in template:
        return None
    if DEEPSEEK_MARKS[0] in template:
        return "deepseek"
    return "hermes" if HERMES_MARKS[0] in template else "llama"


def reader_of(form: Form, names: Collection[str]) -> CallReader:
    """A reader of this form. names: of the tools."""
    match form:
        case "hermes":
            return HermesReader()
        case "deepseek":
            return DeepSeekReader()
        case "llama":
            return ObjectsReader(names)


def reasons(parser: ReasoningParser, template: str | None) -> bool:
    """True if a model's texts may begin with reasoning."""
    return parser not in ("auto", "none") or (parser == "auto" and template is not None and END in template)
