"""The span of a request in every API: it continues the caller's trace and is passed to the services."""

import grpc
import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from smg_grpc_proto import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc

from outrider.wire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.collectors import HttpCollector, plain
from tests.support.gateway.engines import tokenizer
from tests.support.gateway.services import Gateway, until

A = tokenizer().encode("A").ids
CALLER = "b7ad6b7169203331"
VLLM, SGLANG = "vllm.grpc.engine.VllmEngine/Generate", "sglang.grpc.scheduler.SglangScheduler/Generate"


@pytest.fixture(scope="module")
def collector():
    with HttpCollector() as made:
        yield made


@pytest.fixture(scope="module")
def gateway(folder, target, draft, collector):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds between two exports
        flags = {"grpc_facades": ["vllm", "sglang"], "enable_log_requests": True, "log_format": "json"}
        made = Gateway(folder, [target.address], [draft.address], otlp_traces_endpoint=collector.url, **flags).wait()
    yield made
    assert made.stop() == 0


def rest(gateway, channel, metadata, n, most, name):
    body = {"prompt": "A", "max_tokens": most, "n": n, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{gateway.url}/v1/completions", json=body, headers=dict(metadata) | {"X-Request-Id": name})


def ours(gateway, channel, metadata, n, most, name):
    wanted = gateway_pb2.GenerateRequest(text="A", max_tokens=most, ignore_eos=True)
    return list(gateway_pb2_grpc.GatewayServiceStub(channel).Generate(wanted, metadata=metadata, timeout=30))


def vllm(gateway, channel, metadata, n, most, name):
    pb = vllm_engine_pb2
    params = pb.SamplingParams(temperature=0.0, max_tokens=most, n=n, ignore_eos=True)
    tokens = pb.TokenizedInput(input_ids=A)
    wanted = pb.GenerateRequest(request_id=name, tokenized=tokens, sampling_params=params, stream=True)
    return list(vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(wanted, metadata=metadata, timeout=30))


def sglang(gateway, channel, metadata, n, most, name):
    pb = sglang_scheduler_pb2
    params = pb.SamplingParams(top_p=1.0, top_k=-1, repetition_penalty=1.0, max_new_tokens=most, n=n, ignore_eos=True)
    tokens = pb.TokenizedInput(input_ids=A)
    wanted = pb.GenerateRequest(request_id=name, tokenized=tokens, sampling_params=params)
    return list(sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel).Generate(wanted, metadata=metadata, timeout=30))


ENDPOINTS = [
    (rest, 2, {"http.route": "/v1/completions", "http.response.status_code": 200, "gen_ai.request.stream": False}),
    (ours, 1, {"rpc.method": "outrider.wire.v1.GatewayService/Generate", "gen_ai.request.stream": True}),
    (vllm, 2, {"rpc.method": VLLM, "rpc.system.name": "grpc", "gen_ai.request.stream": True}),
    (sglang, 2, {"rpc.method": SGLANG, "rpc.system.name": "grpc", "gen_ai.request.stream": False}),
]


def caller(number, *, sampled=True):
    """A trace id, and the metadata of a caller in it."""
    trace_id = f"{number:032x}"
    return trace_id, (("traceparent", f"00-{trace_id}-{CALLER}-0{int(sampled)}"), ("tracestate", "they=wait"))


def only_span(collector, trace_id):
    ((service, _), span) = next(iter(until(lambda: collector.trace(trace_id)).items()))
    assert service == "outrider-gateway"
    return span


@pytest.mark.parametrize(("endpoint", "n", "attributes"), ENDPOINTS)
def test_a_caller_s_trace_is_continued(gateway, channel, collector, monkeypatch, target, endpoint, n, attributes):
    opened, take = [], target.engine.open

    def noting(request):
        opened.append(request)
        take(request)

    monkeypatch.setattr(target.engine, "open", noting)
    trace_id, metadata = caller(1 + [row[0] for row in ENDPOINTS].index(endpoint))
    endpoint(gateway, channel, metadata, n, 5, f"named-{endpoint.__name__}")
    span = only_span(collector, trace_id)
    assert (span.name, span.parent_span_id.hex(), span.trace_state) == ("text_completion counting", CALLER, "they=wait")
    assert span.kind == span.SPAN_KIND_SERVER
    assert {request.traceparent for request in opened} == {f"00-{trace_id}-{span.span_id.hex()}-01"}
    wanted = attributes | {
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.choice.count": n,
        "gen_ai.usage.input_tokens": len(A),
        "gen_ai.usage.output_tokens": 5 * n,
        "gen_ai.response.finish_reasons": ["length"] * n,
    }
    if endpoint is not ours:  # it creates request ids itself
        wanted["gen_ai.response.id"] = f"named-{endpoint.__name__}"
    attributes = plain(span.attributes)
    assert {name: attributes.get(name) for name in wanted} == wanted
    assert f'"request_id": "{attributes["gen_ai.response.id"]}"' in gateway.log.read_text().replace('":"', '": "')


@pytest.mark.parametrize(("endpoint", "n", "attributes"), ENDPOINTS[1:])
def test_a_refused_call_is_an_error(gateway, channel, collector, endpoint, n, attributes):
    trace_id, metadata = caller(16 + [row[0] for row in ENDPOINTS].index(endpoint))
    with pytest.raises(grpc.RpcError, match="does not fit"):
        endpoint(gateway, channel, metadata, n, 10**6, "long")
    span = only_span(collector, trace_id)
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert plain(span.attributes)["error.type"] == "ContextTooLong"


def test_unsampled_traces_are_not_exported(gateway, channel, collector):
    silent, metadata = caller(32, sampled=False)
    followed, others = caller(33)
    for endpoint, n, _ in ENDPOINTS:
        endpoint(gateway, channel, metadata, n, 3, "silent")
    vllm(gateway, channel, others, 1, 3, "followed")
    only_span(collector, followed)
    assert collector.trace(silent) == {}


def test_a_cancelled_call_is_traced_as_aborted(gateway, channel, collector, target, monkeypatch):
    monkeypatch.setattr(target.engine, "delay", 0.05)
    trace_id, metadata = caller(34)
    pb = vllm_engine_pb2
    params = pb.SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    wanted = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=A), sampling_params=params, stream=True)
    call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(wanted, metadata=metadata, timeout=30)
    next(call)
    call.cancel()
    span = only_span(collector, trace_id)
    assert plain(span.attributes)["gen_ai.response.finish_reasons"] == ["abort"]
    assert span.status.code != span.status.STATUS_CODE_ERROR
