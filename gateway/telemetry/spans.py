"""The span of a request at the gateway, whose children are the spans of its sessions on the services.

It begins with the request's first generation, below the span that the request's headers name, and ends once the answer
was sent and all generations ended. Attributes follow OpenTelemetry's conventions for generative AI and hold no text.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from gateway.sessions.session import Session
from outrider.tracing import Tracing, Value

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from gateway.sessions.request import GenerationRequest

_FAILED = ("error", "overloaded")  # outcomes of generations

CURRENT: ContextVar[RequestSpan | None] = ContextVar("request_span", default=None)


class RequestSpan:
    """The span of one request. Call `leave` when its answer has been sent."""

    def __init__(self, tracing: Tracing, operation: str, headers: Mapping[str, str], request_id: str) -> None:
        """operation: chat or text_completion. headers: by lower-case name, including the caller's traceparent."""
        self._tracing = tracing
        self._operation = operation
        self._headers = headers
        self._request_id = request_id
        self._began, self._began_ns = time.perf_counter(), time.time_ns()
        self._span: Span | None = None
        self._holders = 1  # the request and its generations
        self._prompts: list[Sequence[int]] = []
        self._firsts: list[float] = []
        self._reasons: list[str] = []
        self._counts = dict.fromkeys(("output", "cached", "steps", "verified", "accepted"), 0)
        self.attributes: dict[str, Value] = {}

    def join(self, request: GenerationRequest, model: str) -> str:
        """A generation is about to begin. Returns the traceparent for the services."""
        if self._span is None:
            self._span = self._tracing.begin(f"{self._operation} {model}", self._headers, self._began_ns)
            self._span.set_attributes(self._request_attributes(request, model))
        if not any(prompt is request.prompt for prompt in self._prompts):  # choices may share one
            self._prompts.append(request.prompt)
        return self._tracing.traceparent(self._span)

    def hold(self) -> None:
        """A generation has begun; the span stays open until it ends."""
        self._holders += 1

    def leave(self, session: Session | None = None, outcome: str = "") -> None:
        """The answer was sent, or a generation ended, with this session and outcome."""
        if session is not None:
            self._reasons.append(outcome)
            if outcome in _FAILED:
                self.attributes.setdefault("error.type", outcome)
            if session.stats.steps:
                self._firsts.append(session.stats.first_at - self._began)
            for name, count in (
                ("output", session.new_tokens),
                ("cached", session.stats.cached_tokens),
                ("steps", len(session.stats.steps)),
                ("verified", session.stats.verified),
                ("accepted", session.stats.accepted),
            ):
                self._counts[name] += count
        self._holders -= 1
        if not self._holders and self._span is not None:
            self._end(self._span)

    def fail(self, kind: str) -> None:
        """The request ended with an error."""
        self.attributes["error.type"] = kind

    def _request_attributes(self, request: GenerationRequest, model: str) -> dict[str, Value]:
        sampling = request.sampling
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "outrider",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": self._request_id,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
        given: tuple[tuple[str, Any], ...] = (
            ("max_tokens", request.stop.max_tokens),
            ("seed", request.seed),
            ("top_k", sampling.top_k or None),
            ("frequency_penalty", sampling.frequency_penalty or None),
            ("presence_penalty", sampling.presence_penalty or None),
            ("stop_sequences", list(request.stop.strings) or None),
        )
        return attributes | {f"gen_ai.request.{name}": value for name, value in given if value is not None}

    def _end(self, span: Span) -> None:
        from opentelemetry.trace import StatusCode

        counts = self._counts
        span.set_attributes(
            {
                "gen_ai.request.choice.count": max(len(self._reasons), 1),
                "gen_ai.usage.input_tokens": sum(map(len, self._prompts)),
                "gen_ai.usage.output_tokens": counts["output"],
                "gen_ai.usage.cache_read.input_tokens": counts["cached"],
                "gen_ai.response.finish_reasons": self._reasons,
                "gen_ai.latency.e2e": time.perf_counter() - self._began,
                "outrider.steps": counts["steps"],
                "outrider.verified_draft_tokens": counts["verified"],
                "outrider.accepted_draft_tokens": counts["accepted"],
                **self.attributes,
            }
        )
        if counts["steps"]:
            first = min(self._firsts)
            span.set_attribute("gen_ai.response.time_to_first_chunk", first)
            span.set_attribute("gen_ai.latency.time_to_first_token", first)
            span.set_attribute("outrider.accept_length", counts["output"] / counts["steps"])
        if "error.type" in self.attributes:
            span.set_status(StatusCode.ERROR)
        span.end()


@contextlib.contextmanager
def spanning(
    tracing: Tracing, operation: str, headers: Mapping[str, str], request_id: str, attributes: Mapping[str, Value]
) -> Iterator[RequestSpan]:
    """A request's span, while its answer is being made. attributes: of the span; others as in RequestSpan."""
    span = RequestSpan(tracing, operation, headers, request_id)
    span.attributes |= attributes
    try:
        yield span
    except Exception as error:
        span.fail(type(error).__name__)
        raise
    finally:
        span.leave()


def spanning_call(
    tracing: Tracing | None, context: Any, method: str, request_id: str, *, chat: bool = False, stream: bool = True
) -> AbstractContextManager[RequestSpan | None]:
    """The span of a gRPC call, whose metadata are its headers; none without tracing.

    context: of the call. method: package.Service/Method. stream: True if the answer is streamed
    """
    if tracing is None:
        return nullcontext()
    headers = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
    attributes: dict[str, Value] = {"rpc.system.name": "grpc", "rpc.method": method, "gen_ai.request.stream": stream}
    return spanning(tracing, "chat" if chat else "text_completion", headers, request_id, attributes)
