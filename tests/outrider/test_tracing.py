"""Traces: spans as a collector receives them. Those of a running system: tests/system/test_telemetry.py."""

import socket
import time

import pytest

pytest.importorskip("opentelemetry.sdk")

from outrider.errors import ConfigError
from outrider.tracing import tracing_to
from tests.support.collectors import Collector, HttpCollector, plain

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def collector():
    made = Collector()
    yield made
    made.stop()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("listens", [True, False])
def test_a_collector_that_does_not_answer_does_not_block_the_end(monkeypatch, caplog, protocol, listens):
    monkeypatch.setenv(GENERAL, protocol)
    monkeypatch.setattr("outrider.tracing._FLUSH_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        with tracing_to(f"http://127.0.0.1:{silent.getsockname()[1]}", "target") as tracing:
            tracing.add("decode", "", 1000, 2000, {})
            began = time.monotonic()
        assert time.monotonic() - began < 3
    assert "did not accept the last spans within 0.2 s" in caplog.text


def test_without_an_endpoint_there_are_no_spans():
    with tracing_to(None, "target") as tracing:
        assert tracing is None


GENERAL, TRACES = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


@pytest.mark.parametrize("variables", [{GENERAL: "http/protobuf"}, {GENERAL: "grpc", TRACES: "http/protobuf"}])
@pytest.mark.parametrize(
    ("endpoint", "path"),
    [("{url}", "/v1/traces"), ("{url}/", "/v1/traces"), ("{host}", "/v1/traces"), ("{url}/of/ours", "/of/ours")],
)
def test_spans_by_http(monkeypatch, variables, endpoint, path):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=a b")
    with HttpCollector() as collector:
        with tracing_to(endpoint.format(url=collector.url, host=collector.url.split("//")[1]), "target") as tracing:
            tracing.add("decode", f"00-{TRACE}-{CALLER}-01", 1000, 2000, {"outrider.session_id": 7})
        (found,) = collector.trace(TRACE).values()
        assert (found.name, found.parent_span_id.hex()) == ("decode", CALLER)
        assert (found.start_time_unix_nano, found.end_time_unix_nano) == (1000, 2000)
        assert plain(found.attributes) == {"outrider.session_id": 7}
        ((asked, headers),) = collector.asked
        assert (asked, headers["content-type"], headers["x-tenant"]) == (path, "application/x-protobuf", "a b")


def test_an_empty_variable_chooses_nothing(monkeypatch, collector):
    monkeypatch.setenv(GENERAL, "")
    monkeypatch.setenv(TRACES, "")
    trace_id = "3" * 32
    with tracing_to(collector.url, "target") as tracing:
        tracing.add("decode", f"00-{trace_id}-{CALLER}-01", 1000, 2000, {})
    assert set(collector.trace(trace_id)) == {("outrider-target", "decode")}


@pytest.mark.parametrize("variable", [GENERAL, TRACES])
def test_a_protocol_that_is_not_known_is_refused(monkeypatch, variable):
    monkeypatch.setenv(variable, "carrier pigeon")
    with pytest.raises(ConfigError, match=f"{variable} is carrier pigeon"), tracing_to("http://127.0.0.1:1", "target"):
        pass


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"outrider\[otel\]"), tracing_to("http://127.0.0.1:1", "target"):
        pass
