"""OpenAI's /v1/responses, for text: nothing is kept, so every request brings the whole conversation.

Events of a stream have names of their own and a number each; there is no [DONE].
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.answers.errors import body_of
from gateway.api.answers.logprobs import ChatTeller
from gateway.api.requests.fields import BOUNDED, Count, Flag, Items, few
from gateway.api.requests.grammars import grammar_of
from gateway.api.requests.messages import Message, TextPart, conversation_options
from gateway.api.requests.schemas import GenerationBody
from gateway.orchestration.generation import Generation, Part
from gateway.orchestration.generator import Generator
from gateway.sessions.request import GenerationRequest
from gateway.sessions.step_stats import Detail
from gateway.text.pieces import Pieces
from outrider.errors import InvalidRequest, OutriderError
from outrider.serving.messages import MAX_LOGPROBS, Grammar
from outrider.speculation.proposal import FinishReason

# Fields that are not supported, and the values with which they change nothing.
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
        """As a chat has it."""
        if isinstance(self.content, str):
            return Message(role=self.role, content=self.content)
        return Message(role=self.role, content=[TextPart(type="text", text=part.text) for part in self.content])


class ReasoningBody(BaseModel):
    """How much the model is to reason; what it reasons is not summed up here."""

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
    metadata: Annotated[dict[str, str], few(16)] | None = None  # as many as OpenAI allows
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
        if self.tries > 1:
            raise InvalidRequest("`best_of` is 1 here", param="best_of")
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
        """How much the model is to reason, as the request says."""
        return self.reasoning.effort if self.reasoning is not None else None

    def template_options(self) -> dict[str, Any]:
        """What the template is told besides the messages, under the names that chats have. Raises InvalidRequest."""
        named = {"reasoning_effort": self.effort} if self.effort is not None else {}
        return named | conversation_options(None, None, self.chat_template_kwargs)

    def asked_limit(self) -> int | None:
        """Under the name that it has here, or the older one."""
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    @property
    def begins(self) -> bool:
        """As in GenerationBody."""
        return True

    def likeliest(self) -> int | None:
        """Told if `include` says so."""
        return self.top_logprobs or 0 if _LOGPROBS in (self.include or ()) else None

    def format(self) -> dict[str, Any]:
        """What the text must look like, as the request says it. Raises InvalidRequest."""
        told = (self.text or {}).get("format") or {"type": "text"}
        if not isinstance(told, dict):
            raise InvalidRequest("text.format must be an object", param="text.format")
        try:
            orjson.dumps(told)  # it is part of the answer
        except TypeError as error:
            raise InvalidRequest(f"text.format: {error}", param="text.format") from None
        return told

    def grammar(self) -> Grammar | None:
        """What the text must look like. Raises InvalidRequest."""
        told = self.format()
        schema = told.get("schema")
        wanted = {"type": told.get("type"), "schema": schema, "json_schema": {"schema": schema}}
        return grammar_of({**(self.model_extra or {}), "response_format": wanted})


class ResponseReply:
    """One response under way."""

    def __init__(
        self,
        body: ResponsesBody,
        wanted: GenerationRequest,
        pieces: Pieces,
        *,
        request_id: str,
        model: str,
        detail: Detail,
    ) -> None:
        """model: the name that is served. detail: of speculation in its metrics."""
        self._wanted = wanted
        self._request_id = request_id
        self._detail = detail
        self._teller = ChatTeller(pieces, by_id=bool(body.return_tokens_as_token_ids))
        self._item_id = f"msg_{secrets.token_hex(12)}"
        self._generation: Generation | None = None
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._last: Part | None = None
        self._number = 0
        user = (body.model_extra or {}).get("user")
        self._head: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": body.effort, "summary": None},
            "store": False,
            "temperature": wanted.sampling.temperature,
            "text": {"format": body.format()},
            "tool_choice": "auto",
            "tools": [],
            "top_p": wanted.sampling.top_p,
            "truncation": "disabled",
            "user": user if isinstance(user, str) else None,  # not all that JSON allows can be told
        }

    async def start(self, generator: Generator) -> None:
        """Open its session. Raises InvalidRequest, Unavailable."""
        self._generation = generator.start(self._wanted, self._request_id)

    def close(self) -> None:
        """Free the session."""
        if self._generation is not None:
            self._generation.close()

    async def whole(self) -> bytes:
        """The finished response."""
        async for _ in self._parts():
            pass
        return orjson.dumps(self._finished())

    async def events(self) -> AsyncIterator[bytes]:
        """Its events. Raises the error that ends them."""
        beginning = {**self._head, **_NOTHING_YET, "status": "in_progress"}
        parts = self._parts()
        first = await anext(parts)  # what is wrong before it still has a status of its own
        yield self._event("response.created", response=beginning)
        yield self._event("response.in_progress", response=beginning)
        item = {"id": self._item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.content_part.added", **place, part=self._part("", []))
        text, logprobs = first
        if text or logprobs:
            yield self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)
        async for text, logprobs in parts:
            if text or logprobs:
                yield self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)
        yield self._event("response.output_text.done", **place, text=self._text, logprobs=self._logprobs)
        yield self._event("response.content_part.done", **place, part=self._part(self._text, self._logprobs))
        finished = self._finished()
        yield self._event("response.output_item.done", output_index=0, item=finished["output"][0])
        yield self._event(f"response.{finished['status']}", response=finished)

    def failed(self, error: OutriderError) -> bytes:
        """The event that ends a stream which fails on its way. Clients look for the error by itself, too."""
        told = orjson.loads(body_of(error))["error"]
        return self._event("error", **{key: told[key] for key in ("code", "message", "param")}, error=told)

    async def _parts(self) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
        """Text and log-probabilities, as they come."""
        assert self._generation is not None, "a response is started before it is told"
        finish = FinishReason.RUNNING
        while finish is FinishReason.RUNNING:
            part = self._last = await self._generation.next()
            finish = part.finish
            told: list[dict[str, Any]] = []
            if part.logprobs is not None and part.spoken:
                told = self._teller.part(part.tokens[: part.spoken], part.logprobs)["content"]
            self._text += part.text
            self._logprobs += told
            yield part.text, told

    def _event(self, name: str, **content: Any) -> bytes:
        event = {"type": name, "sequence_number": self._number, **content}
        self._number += 1
        return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _finished(self) -> dict[str, Any]:
        part = self._last
        assert part is not None, "a response that is told has begun"
        reason = _REASONS.get(part.finish)
        status = "completed" if reason is None else "incomplete"
        item = {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self._part(self._text, self._logprobs)],
        }
        told = {**self._head, **_NOTHING_YET, "status": status, "output": [item]}
        told["incomplete_details"] = {"reason": reason} if reason else None
        return told | {"usage": _usage(part), **self._reports(part)}

    def _reports(self, part: Part) -> dict[str, Any]:
        if part.report is None or self._detail == "off":
            return {}
        return {"metrics": part.report.metrics(self._detail), "timings": part.report.timings()}


_REASONS = {FinishReason.LENGTH: "max_output_tokens", FinishReason.ABORT: "aborted"}
_NOTHING_YET: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}


def _usage(part: Part) -> dict[str, Any]:
    return {
        "input_tokens": part.prompt_tokens,
        "input_tokens_details": {"cached_tokens": part.cached_tokens},
        "output_tokens": part.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": part.accepted,
            "rejected_prediction_tokens": part.verified - part.accepted,
        },
        "total_tokens": part.prompt_tokens + part.completion_tokens,
    }
