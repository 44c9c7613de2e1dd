"""Bodies of OpenAI's /v1/responses, for text."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.requests.fields import BOUNDED, Count, Flag, Items, few
from gateway.api.requests.grammars import grammar_of
from gateway.api.requests.messages import Message, TextPart, conversation_options
from gateway.api.requests.schemas import GenerationBody
from outrider.errors import InvalidRequest
from outrider.serving.messages import MAX_LOGPROBS, Grammar

# Unsupported fields, and their values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "max_tool_calls": (None,),
}
_LOGPROBS = "message.output_text.logprobs"


class InputPart(BaseModel):
    """A part of an item's content."""

    model_config = ConfigDict(extra="allow")

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputItem(BaseModel):
    """A message of the conversation so far."""

    model_config = ConfigDict(extra="allow")

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[InputPart]

    def message(self) -> Message:
        """The item as a chat message."""
        if isinstance(self.content, str):
            return Message(role=self.role, content=self.content)
        return Message(role=self.role, content=[TextPart(type="text", text=part.text) for part in self.content])


class ReasoningBody(BaseModel):
    """How much the model reasons. Summaries of reasoning are not supported."""

    effort: str | None = None


class ResponsesBody(GenerationBody):
    """POST /v1/responses."""

    prompt_field = "input"

    input: Annotated[str | Items[InputItem], BOUNDED] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: Count | None = Field(None, ge=1)
    text: dict[str, Any] | None = None
    include: Items[str] | None = None
    top_logprobs: Count | None = Field(None, ge=0, le=MAX_LOGPROBS)
    metadata: Annotated[dict[str, str], few(16)] | None = None  # OpenAI's limit
    store: Flag | None = None
    reasoning: ReasoningBody | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_supported(self) -> None:
        """As in GenerationBody."""
        super().check_supported()
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise InvalidRequest(f"`{name}` is not supported by this server; leave it out", param=name)
        if self.choices > 1:
            raise InvalidRequest("`n` is 1 here", param="n")
        if self.candidates > 1:
            raise InvalidRequest("`best_of` is 1 here", param="best_of")
        if self.reports_steps:
            raise InvalidRequest("`speculation.report` is for chats and completions", param="speculation.report")
        if unknown := [name for name in self.include or () if name != _LOGPROBS]:
            raise InvalidRequest(f"`include` may name {_LOGPROBS}, and not {unknown[0]}", param="include")

    def messages(self) -> list[Message]:
        """The conversation."""
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*first, Message(role="user", content=self.input)]
        return [*first, *(item.message() for item in self.input)]

    @property
    def effort(self) -> str | None:
        """The requested reasoning effort."""
        return self.reasoning.effort if self.reasoning is not None else None

    def template_options(self) -> dict[str, Any]:
        """Variables of the chat template besides the messages, named as for chats. Raises InvalidRequest."""
        named = {"reasoning_effort": self.effort} if self.effort is not None else {}
        return named | conversation_options(None, None, self.chat_template_kwargs)

    def requested_max_tokens(self) -> int | None:
        """As in GenerationBody; `max_output_tokens` precedes `max_tokens`."""
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    @property
    def new_text(self) -> bool:
        """As in GenerationBody."""
        return True

    def top_logprobs_count(self) -> int | None:
        """As in GenerationBody; requested by `include`."""
        return self.top_logprobs or 0 if _LOGPROBS in (self.include or ()) else None

    def format(self) -> dict[str, Any]:
        """The requested `text.format`. Raises InvalidRequest."""
        requested = (self.text or {}).get("format") or {"type": "text"}
        if not isinstance(requested, dict):
            raise InvalidRequest("text.format must be an object", param="text.format")
        try:
            orjson.dumps(requested)  # the answer repeats it
        except TypeError as error:
            raise InvalidRequest(f"text.format: {error}", param="text.format") from None
        return requested

    def grammar(self) -> Grammar | None:
        """As in GenerationBody."""
        requested = self.format()
        schema = requested.get("schema")
        wanted = {"type": requested.get("type"), "schema": schema, "json_schema": {"schema": schema}}
        grammar = grammar_of({**(self.model_extra or {}), "response_format": wanted})
        own = grammar is not None and grammar.client_field == "response_format"
        return replace(grammar, client_field="text.format") if grammar is not None and own else grammar
