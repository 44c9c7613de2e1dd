"""Replies of OpenAI's /v1/responses. Events have names and consecutive numbers; there is no [DONE]."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from gateway.api.answers.errors import body_of
from gateway.api.answers.logprobs import ChatLogprobs
from gateway.api.requests.responses import ResponsesBody
from gateway.orchestration.generation import Generation, Part
from gateway.sessions.request import GenerationRequest
from gateway.sessions.speculation_report import Detail
from gateway.text.pieces import Pieces
from outrider.errors import OutriderError
from outrider.speculation.proposal import FinishReason


class ResponsesReply:
    """The reply to one /v1/responses."""

    def __init__(
        self,
        body: ResponsesBody,
        request: GenerationRequest,
        pieces: Pieces,
        *,
        request_id: str,
        model: str,
        detail: Detail,
    ) -> None:
        """model: served name. detail: of speculation in `metrics`."""
        self._detail = detail
        self._formatter = ChatLogprobs(pieces, by_id=bool(body.return_tokens_as_token_ids))
        self._item_id = f"msg_{secrets.token_hex(12)}"
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
            "temperature": request.sampling.temperature,
            "text": {"format": body.format()},
            "tool_choice": "auto",
            "tools": [],
            "top_p": request.sampling.top_p if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "user": user if isinstance(user, str) else None,  # other values may not be serializable
        }

    async def whole(self, generations: Sequence[Generation]) -> bytes:
        """As in Reply."""
        async for _ in self._parts(*generations):
            pass
        return orjson.dumps(self._finished())

    async def events(self, generations: Sequence[Generation]) -> AsyncIterator[bytes]:
        """As in Reply."""
        beginning = {**self._head, **_EMPTY, "status": "in_progress"}
        parts = self._parts(*generations)
        first = await anext(parts)  # first, because an error before it gets an HTTP status
        yield self._event("response.created", response=beginning)
        yield self._event("response.in_progress", response=beginning)
        item = {"id": self._item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        position = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.content_part.added", **position, part=self._part("", []))
        text, logprobs = first
        if text or logprobs:
            yield self._event("response.output_text.delta", **position, delta=text, logprobs=logprobs)
        async for text, logprobs in parts:
            if text or logprobs:
                yield self._event("response.output_text.delta", **position, delta=text, logprobs=logprobs)
        yield self._event("response.output_text.done", **position, text=self._text, logprobs=self._logprobs)
        yield self._event("response.content_part.done", **position, part=self._part(self._text, self._logprobs))
        finished = self._finished()
        yield self._event("response.output_item.done", output_index=0, item=finished["output"][0])
        yield self._event(f"response.{finished['status']}", response=finished)

    def failed(self, error: OutriderError) -> bytes:
        """The event that ends a stream after an error. Clients read the error at the top level or under `error`."""
        content = orjson.loads(body_of(error))["error"]
        return self._event("error", **{key: content[key] for key in ("code", "message", "param")}, error=content)

    async def _parts(self, generation: Generation) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
        """Text and log-probabilities, part by part."""
        finish = FinishReason.RUNNING
        while finish is FinishReason.RUNNING:
            part = self._last = await generation.next()
            finish = part.finish
            logprobs: list[dict[str, Any]] = []
            if part.logprobs is not None and part.text_tokens:
                logprobs = self._formatter.part(part.tokens[: part.text_tokens], part.logprobs)["content"]
            self._text += part.text
            self._logprobs += logprobs
            yield part.text, logprobs

    def _event(self, name: str, **content: Any) -> bytes:
        event = {"type": name, "sequence_number": self._number, **content}
        self._number += 1
        return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _finished(self) -> dict[str, Any]:
        part = self._last
        assert part is not None, "called after the first part"
        reason = _REASONS.get(part.finish)
        status = "completed" if reason is None else "incomplete"
        item = {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self._part(self._text, self._logprobs)],
        }
        response = {**self._head, **_EMPTY, "status": status, "output": [item]}
        response["incomplete_details"] = {"reason": reason} if reason else None
        if part.weight_version:
            response["metadata"] = {"weight_version": part.weight_version, **self._head["metadata"]}
        return response | {"usage": _usage(part), **self._reports(part)}

    def _reports(self, part: Part) -> dict[str, Any]:
        if part.report is None or self._detail == "off":
            return {}
        return {"metrics": part.report.metrics(self._detail), "timings": part.report.timings()}


_REASONS = {FinishReason.LENGTH: "max_output_tokens", FinishReason.ABORT: "aborted"}
_EMPTY: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}


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
