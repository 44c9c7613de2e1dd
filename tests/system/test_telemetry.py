"""What a running system tells of itself: the metrics of the dashboard, and one trace for one request."""

import re
import time

import grpc
import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from prometheus_client.parser import text_string_to_metric_families

from outrider.wire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.collectors import Collector, plain
from tests.support.dashboard import METRIC, expressions
from tests.support.gateway.services import until
from tests.support.system.serve import System
from tests.support.tiny import write_model, write_tokenizer

pytestmark = pytest.mark.system

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def collector():
    made = Collector()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def system(tmp_path_factory, collector):
    folder = write_tokenizer(write_model(tmp_path_factory.mktemp("target")))
    """Its drafter is that of the default flags."""
    flags = ["--speculative-num-draft-tokens", "4", "--log-format", "json", "--otlp-traces-endpoint", collector.url]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # milliseconds between two deliveries
        system = System(folder, *flags).wait()
    yield system
    assert system.stop() == 0


@pytest.fixture(scope="module")
def exposed(system):
    """Samples of /metrics by name, after a few requests with draft tokens and before those of other tests."""

    def samples():
        text = httpx.get(f"{system.url}/metrics").text
        found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {sample.name: [s for s in found if s.name == sample.name] for sample in found}

    def has_draft_tokens():
        system.ask("a b a b a b", max_tokens=200)
        return sum(sample.value for sample in samples().get("outrider_received_draft_tokens_total", ()))

    system.ask_all()
    until(has_draft_tokens, seconds=60)
    return samples()


def test_every_metric_of_the_dashboard_is_exposed(exposed):
    asked = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(asked) > 30
    assert asked - exposed.keys() == set()


def test_labels_that_the_dashboard_groups_by_are_there(exposed):
    for expression in expressions():
        for labels, name in re.findall(r"by \(([a-z, ]+)\) \((?:rate\()?([a-z_]+)", expression):
            for label in labels.split(", "):
                assert all(label in sample.labels for sample in exposed[name]), expression


def test_draft_tokens_are_accounted_for(exposed):
    def total(name):
        return sum(sample.value for sample in exposed[name])

    misses = {s.labels["cause"]: s.value for s in exposed["outrider_steps_without_draft_by_cause_total"]}
    assert set(misses) == {"without_drafter", "paused", "late", "empty", "not_selected"}
    assert total("outrider_received_draft_tokens_total") > 0
    verified = total("outrider_verified_draft_tokens_total")
    assert verified + total("outrider_unverified_draft_tokens_total") == total("outrider_received_draft_tokens_total")
    accepted = total("outrider_accepted_draft_tokens_total")
    assert total("outrider_rejected_draft_tokens_total") == verified - accepted
    assert total("outrider_accepted_draft_tokens_by_position_total") == accepted
    assert total("outrider_draft_lag_tokens_count") > 0
    same = ("vllm:generation_tokens_total", "sglang:generation_tokens_total", "outrider_generated_tokens_total")
    assert len({total(name) for name in same}) == 1
    finished = {s.labels["finished_reason"]: s.value for s in exposed["vllm:request_success_total"]}
    assert finished["length"] == total("sglang:num_requests_total") == total("outrider_request_duration_seconds_count")
    assert 0 <= total("vllm:kv_cache_usage_perc") == total("sglang:token_usage") <= 1
    for prefix in ("vllm", "sglang"):
        assert total(f"{prefix}:e2e_request_latency_seconds_count") == finished["length"]


def complete(system, headers=(), **options):
    body = {"model": "default", "prompt": "a b a b", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{system.url}/v1/completions", json=body | options, headers=dict(headers), timeout=60)


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
