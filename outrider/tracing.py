"""OpenTelemetry traces of processes with `--otlp-traces-endpoint`.

Without the flag a process does not import the libraries, which are the extra `otel`. With it, a session carries the W3C
`traceparent` of its request; the services record three times of a session and create its spans when it ends, never
during a step.
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
_FLUSH_SECONDS = 3.0  # maximum wait for the last spans at the end of a process
_GIVING_UP_SECONDS = 1.0  # for deliveries to notice the shutdown; later ones end with the process
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")  # the first one that is set applies
_HTTP_PATH = "/v1/traces"  # path of OTLP collectors for traces over HTTP


class Tracing:
    """Creates spans of one process and sends them in the background. Times are in nanoseconds since 1970."""

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
        """Start a server span, as a child of the span in the headers, if there is one."""
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(headers)
        return self._tracer.start_span(name, context=context, kind=SpanKind.SERVER, start_time=start)

    def traceparent(self, span: Span) -> str:
        """The W3C traceparent of a span; empty if it is not recorded, so that the services record nothing either."""
        from opentelemetry.trace import set_span_in_context

        if not span.is_recording():
            return ""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent", "")

    def add(self, name: str, traceparent: str, start: int, end: int, attributes: Mapping[str, Value]) -> None:
        """Add a complete span as a child of the span in `traceparent`."""
        context = self._propagator.extract({"traceparent": traceparent})
        span = self._tracer.start_span(name, context=context, start_time=start, attributes=dict(attributes))
        span.end(max(start, end))

    def stop(self) -> None:
        """Send the remaining spans, for at most a few seconds."""
        # The libraries ignore their own limits: a collector that does not answer would block the process for 10 s.
        flushing = threading.Thread(target=self._flush, name="last-spans", daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)
        if flushing.is_alive():
            log.warning("the trace collector did not accept the last spans within %g s", _FLUSH_SECONDS)
            self._exporter.shutdown()
            flushing.join(_GIVING_UP_SECONDS)

    def _flush(self) -> None:
        self._provider.force_flush()
        self._provider.shutdown()


@contextlib.contextmanager
def tracing_to(endpoint: str | None, role: str) -> Iterator[Tracing | None]:
    """Tracing to an OTLP collector until the context ends; None without an endpoint.

    endpoint: a URL such as http://127.0.0.1:4317, or host:port. OpenTelemetry's variables apply:
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL or OTEL_EXPORTER_OTLP_PROTOCOL is grpc (default) or http/protobuf, and
    OTEL_TRACES_SAMPLER selects the recorded traces. Raises ConfigError.
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
    """The protocol in OpenTelemetry's variables; empty ones are ignored. Raises ConfigError."""
    variable = next((name for name in _PROTOCOLS if os.environ.get(name)), None)
    protocol = "grpc" if variable is None else os.environ[variable]
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(f"{variable} is {protocol}; use grpc or http/protobuf")
    return protocol


def _http_url(endpoint: str) -> str:
    """A complete URL, with the collectors' default path if it has none."""
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + _HTTP_PATH


def _exporter(endpoint: str, protocol: str) -> SpanExporter:
    try:
        import opentelemetry.sdk.trace  # noqa: F401 - to raise ImportError if it is missing

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
