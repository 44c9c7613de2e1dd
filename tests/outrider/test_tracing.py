"""Traces: one tree of spans for one request in three processes, as a collector receives it."""

import socket
import time

import grpc
import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from outrider.errors import ConfigError
from outrider.tracing import tracing_to
from outrider.wire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.collectors import Collector, HttpCollector, plain
from tests.support.gateway.services import until
from tests.support.system.serve import System
from tests.support.tiny import write_model, write_tokenizer

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def collector():
    made = Collector()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def system(tmp_path_factory, collector):
    folder = write_tokenizer(write_model(tmp_path_factory.mktemp("target")))
    flags = ["--speculative-algorithm", "NGRAM", "--otlp-traces-endpoint", collector.url, "--log-format", "json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # milliseconds between two deliveries
        system = System(folder, *flags).wait()
    yield system
    assert system.stop() == 0


def complete(system, headers=(), **options):
    body = {"model": "default", "prompt": "a b a b", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{system.url}/v1/completions", json=body | options, headers=dict(headers), timeout=60)


@pytest.mark.system
def test_one_trace_through_three_processes(system, collector):
    before = time.time_ns()
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "X-Request-Id": "q7"}
    assert complete(system, headers, seed=5, top_p=0.5, stop=["never said"]).status_code == 200
    trace = until(lambda: len(collector.trace(TRACE)) == 5 and collector.trace(TRACE), seconds=60)
    names = {("outrider-gateway", next(name for service, name in trace if service == "outrider-gateway"))}
    names |= {("outrider-target", name) for name in ("queue", "prefill", "decode")} | {("outrider-draft", "draft")}
    assert set(trace) == names
    (request,) = [span for (service, _), span in trace.items() if service == "outrider-gateway"]
    assert request.name.startswith("text_completion ")
    assert request.parent_span_id.hex() == CALLER
    assert request.kind == request.SPAN_KIND_SERVER
    others = [span for (service, _), span in trace.items() if service != "outrider-gateway"]
    assert {span.parent_span_id for span in others} == {request.span_id}
    assert len({span.span_id for span in trace.values()}) == 5
    for span in trace.values():
        assert before <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
    queue, prefill, decode = (trace["outrider-target", name] for name in ("queue", "prefill", "decode"))
    assert request.start_time_unix_nano <= queue.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.end_time_unix_nano <= request.end_time_unix_nano


@pytest.mark.system
def test_attributes_are_those_of_the_conventions(system, collector):
    assert complete(system, {"X-Request-Id": "q8"}, seed=5, top_p=0.5, stop=["never said"], n=2).status_code == 200
    trace = collector.whole(gen_ai__response__id="q8")
    reported = {span.name: plain(span.attributes) for span in trace.values()}
    request = next(reported[name] for name in reported if name.startswith("text_completion"))
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.seed": 5,
        "gen_ai.request.stop_sequences": ["never said"],
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": "q8",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.output_tokens": 48,
        "http.response.status_code": 200,
    }
    assert {name: request.get(name) for name in wanted} == wanted
    assert request["gen_ai.request.model"] == request["gen_ai.response.model"]
    assert request["gen_ai.usage.input_tokens"] == reported["prefill"]["gen_ai.usage.input_tokens"]
    assert 0 < request["gen_ai.response.time_to_first_chunk"] <= request["gen_ai.latency.e2e"]
    assert request["outrider.steps"] == 48 - request["outrider.accepted_draft_tokens"]
    assert reported["decode"]["gen_ai.usage.output_tokens"] == 24
    assert reported["draft"]["outrider.drafters"] == ["NGRAM"]
    assert not any("a b a b" in str(value) for span in reported.values() for value in span.values())
    sessions = [plain(s.attributes)["outrider.session_id"] for _, s in collector.spans
                if s.trace_id == next(iter(trace.values())).trace_id and s.name == "decode"]  # fmt: skip
    assert len(sessions) == len(set(sessions)) == 2


@pytest.mark.system
def test_a_stream_that_is_left_and_a_chat_over_grpc(system, collector):
    body = {"model": "default", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{system.url}/v1/completions", json=body, headers={"X-Request-Id": "q9"}) as answer:
        assert answer.status_code == 200
        next(answer.iter_lines())
    trace = collector.whole(gen_ai__response__id="q9")
    request = next(plain(s.attributes) for (service, _), s in trace.items() if service == "outrider-gateway")
    assert request["gen_ai.response.finish_reasons"] in (["abort"], ["length"])
    assert request["gen_ai.request.stream"]
    channel = grpc.insecure_channel(f"127.0.0.1:{system.grpc_port}")
    wanted = gateway_pb2.GenerateRequest(chat={"messages": [{"role": "user", "content": "hi"}]}, max_tokens=4)
    trace_id = "1" * 32
    metadata = (("traceparent", f"00-{trace_id}-{CALLER}-01"),)
    with channel:
        list(gateway_pb2_grpc.GatewayServiceStub(channel).Generate(wanted, metadata=metadata))
    trace = until(lambda: len(collector.trace(trace_id)) == 5 and collector.trace(trace_id), seconds=60)
    assert any(name.startswith("chat ") for _, name in trace)


@pytest.mark.system
def test_refused_requests_are_errors_and_unsampled_ones_are_not_sent(system, collector):
    assert complete(system, {"X-Request-Id": "q10"}, max_tokens=10**9).status_code == 400
    span = next(iter(collector.whole(1, gen_ai__response__id="q10").values()))
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert plain(span.attributes)["error.type"] == "400"
    silent = "2" * 32
    assert complete(system, {"traceparent": f"00-{silent}-{CALLER}-00"}).status_code == 200
    complete(system, {"X-Request-Id": "q11"})
    collector.whole(gen_ai__response__id="q11")
    assert collector.trace(silent) == {}
    assert httpx.get(f"{system.url}/health").status_code == 200
    assert not any("health" in str(plain(span.attributes)) for _, span in collector.spans)


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
