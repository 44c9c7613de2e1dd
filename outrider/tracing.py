"""Traces by OpenTelemetry, for processes that are told where to send them (`--otlp-traces-endpoint`).

A process without that flag imports nothing of it and pays nothing. With it, a session carries the W3C `traceparent` of
its request, services keep three times of it, and make its spans when it ends; a step never does. The libraries are an
extra of the package, `otel`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import outrider
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

Value = str | bool | int | float | Sequence[str]
_FLUSH_SECONDS = 3.0  # that the end of a process waits for its last spans
_GIVING_UP_SECONDS = 1.0  # in which most deliveries notice that they are broken off; others end with the process
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")  # the first that is set counts
_HTTP_PATH = "/v1/traces"  # where collectors take traces by HTTP


class Tracing:
    """Makes spans of one process and sends them in the background. Times are nanoseconds since 1970."""

    def __init__(self, role: str, exporter: SpanExporter) -> None:
        """role: target, draft or gateway."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        facts = {"service.name": f"outrider-{role}", "service.version": outrider.__version__}
        self._exporter = exporter
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
        # The libraries' own limits do not hold: a collector that does not answer would keep the process for 10 s.
        leaving = threading.Thread(target=self._leave, name="last-spans", daemon=True)
        leaving.start()
        leaving.join(_FLUSH_SECONDS)
        if leaving.is_alive():
            log.warning("the collector of traces did not take the last spans in %g s", _FLUSH_SECONDS)
            self._exporter.shutdown()
            leaving.join(_GIVING_UP_SECONDS)

    def _leave(self) -> None:
        self._provider.force_flush()
        self._provider.shutdown()


@contextlib.contextmanager
def tracing_to(endpoint: str | None, role: str) -> Iterator[Tracing | None]:
    """Tracing to an OTLP collector for a process's life; None without an endpoint.

    endpoint: a URL such as http://127.0.0.1:4317, or host:port. Of OpenTelemetry's own variables,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, or OTEL_EXPORTER_OTLP_PROTOCOL, chooses between grpc, the default, and
    http/protobuf, and OTEL_TRACES_SAMPLER what is recorded. Raises ConfigError.
    """
    if endpoint is None:
        yield None
        return
    protocol = _protocol()
    if protocol != "grpc":
        endpoint = _http_url(endpoint)
    tracing = Tracing(role, _exporter(endpoint, protocol))
    log.info("traces go to %s by %s", endpoint, protocol)
    try:
        yield tracing
    finally:
        tracing.stop()


def _protocol() -> str:
    """What OpenTelemetry's variables choose; one that is empty says nothing. Raises ConfigError."""
    variable = next((name for name in _PROTOCOLS if os.environ.get(name)), None)
    protocol = "grpc" if variable is None else os.environ[variable]
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(f"{variable} is {protocol}; use grpc or http/protobuf")
    return protocol


def _http_url(endpoint: str) -> str:
    """A whole URL, with the path that collectors listen at where it has none: nobody takes traces at the root."""
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + _HTTP_PATH


def _exporter(endpoint: str, protocol: str) -> SpanExporter:
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
