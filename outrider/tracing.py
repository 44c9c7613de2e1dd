"""Traces by OpenTelemetry, for processes that are told where to send them (`--otlp-traces-endpoint`).

A process without that flag imports nothing of it and pays nothing. With it, a session carries the W3C `traceparent` of
its request, services keep three times of it, and make its spans when it ends; a step never does. The libraries are an
extra of the package, `otel`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import outrider
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

Value = str | bool | int | float | Sequence[str]
_FLUSH_SECONDS = 3.0  # that the end of a process waits for its last spans


class Tracing:
    """Makes spans of one process and sends them in the background. Times are nanoseconds since 1970."""

    def __init__(self, role: str, exporter: SpanExporter) -> None:
        """role: target, draft or gateway."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        facts = {"service.name": f"outrider-{role}", "service.version": outrider.__version__}
        self._provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("outrider", outrider.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Mapping[str, str], start: int) -> Span:
        """A span that serves a caller; a child of the one that the headers name, if they name one."""
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(headers)
        return self._tracer.start_span(name, context=context, kind=SpanKind.SERVER, start_time=start)

    def traceparent(self, span: Span) -> str:
        """What names a span to others; nothing for one that is not recorded, so that they record nothing either."""
        from opentelemetry.trace import set_span_in_context

        if not span.is_recording():
            return ""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent", "")

    def add(self, name: str, traceparent: str, start: int, end: int, attributes: Mapping[str, Value]) -> None:
        """A whole span below the one that `traceparent` names."""
        context = self._propagator.extract({"traceparent": traceparent})
        span = self._tracer.start_span(name, context=context, start_time=start, attributes=dict(attributes))
        span.end(max(start, end))

    def stop(self) -> None:
        """Send what is left, for a moment."""
        self._provider.force_flush(int(_FLUSH_SECONDS * 1e3))
        self._provider.shutdown()


@contextlib.contextmanager
def tracing_to(endpoint: str | None, role: str) -> Iterator[Tracing | None]:
    """Tracing to an OTLP collector for a process's life; None without an endpoint.

    endpoint: a URL such as http://127.0.0.1:4317, or host:port. Of OpenTelemetry's own variables,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL chooses between grpc, the default, and http/protobuf, and OTEL_TRACES_SAMPLER
    what is recorded. Raises ConfigError.
    """
    if endpoint is None:
        yield None
        return
    tracing = Tracing(role, _exporter(endpoint))
    log.info("traces go to %s", endpoint)
    try:
        yield tracing
    finally:
        tracing.stop()


def _exporter(endpoint: str) -> SpanExporter:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol}; use grpc or http/protobuf")
    try:
        import opentelemetry.sdk.trace  # noqa: F401 - it is looked for

        if protocol == "grpc":
            return _over_grpc(endpoint)
        return _over_http(endpoint)
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs {error.name}, which is not installed; install outrider[otel]"
        ) from None


def _over_grpc(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    made: SpanExporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    return made


def _over_http(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    made: SpanExporter = OTLPSpanExporter(endpoint=endpoint)
    return made
