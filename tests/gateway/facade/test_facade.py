"""The facades on the gateway's gRPC port, through the stubs of the other engines."""

import hashlib
import io
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import sglang_scheduler_pb2, vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2

from tests.support.gateway.engines import BUSY, CONTEXT, EOS, REFUSED, VOCAB, expected, tokenizer, tokenizer_files
from tests.support.gateway.router_clients import SglangClient, VllmClient, refusal
from tests.support.gateway.services import Gateway, free_port, until

A = tokenizer().encode("A").ids
NAMES = ["vllm.grpc.engine.VllmEngine", "sglang.grpc.scheduler.SglangScheduler"]


# --- answers ---


def test_a_whole_answer(engine):
    end = engine.whole(**{engine.limit: 20})
    assert list(end.output_ids) == expected(A, 20)
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens, end.index) == ("length", 1, 20, 0)
    assert end.WhichOneof("matched_stop") is None


def test_chunks_add_up(engine, proposals_in_time):
    chunks, ends = engine.chunks_and_ends(stream=True, **{engine.limit: 40})
    assert [t for chunk in chunks for t in chunk.token_ids] == list(ends[0].output_ids) == expected(A, 40)
    counts = [chunk.completion_tokens for chunk in chunks]
    assert (
        sum(counts) if engine.pb is vllm_engine_pb2 else counts[-1]
    ) == 40  # in vLLM each chunk counts its own tokens
    assert 1 < len(chunks) < 40
    assert 0 < ends[0].spec_accepted_tokens < ends[0].spec_draft_tokens


def test_a_text_prompt(vllm):
    request = vllm.pb.GenerateRequest(text="A", sampling_params=vllm.pb.SamplingParams(temperature=0, max_tokens=3))
    (message,) = vllm.stub.Generate(request)
    assert list(message.complete.output_ids) == expected(A, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_have_consecutive_seeds(engine, stream):
    options = {engine.limit: 10, "n": 3, "temperature": 1.0, **engine.seeded(3)}
    chunks, ends = engine.chunks_and_ends(stream=stream, **options)
    assert sorted(end.index for end in ends) == [0, 1, 2]
    for end in ends:
        assert list(end.output_ids) == expected(A, 10, 1 + end.index)
        if stream:
            assert [t for c in chunks if c.index == end.index for t in c.token_ids] == list(end.output_ids)


@pytest.mark.parametrize("seed", [0, 5, 2**31 - 1])
def test_the_same_tokens_as_in_rest(engine, gateway, target, seed):
    numbers = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "frequency_penalty": 0.3}
    end = engine.whole(**numbers, top_k=20, **{engine.limit: 12}, **engine.seeded(seed))
    over_grpc = target.engine.seen[-1].sampling
    body = gateway.complete(A, **numbers, top_k=20, max_tokens=12, seed=seed, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == list(end.output_ids)
    assert target.engine.seen[-1].sampling == over_grpc


def test_sampling_reaches_the_target(engine, target):
    bias = {7: -100.0} if engine.pb is vllm_engine_pb2 else {"7": -100.0}
    shortest = "min_tokens" if engine.pb is vllm_engine_pb2 else "min_new_tokens"
    engine.whole(presence_penalty=0.5, logit_bias=bias, stop_token_ids=[9], ignore_eos=True, regex="a+",
                 **{engine.limit: 4, shortest: 2})  # fmt: skip
    seen = target.engine.seen[-1]
    assert (seen.sampling.presence_penalty, seen.sampling.logit_bias) == (0.5, ((7, -100.0),))
    assert (seen.stop.max_tokens, seen.stop.min_tokens, seen.stop.ignore_eos) == (4, 2, True)
    assert 9 in seen.stop.stop_token_ids
    assert (seen.grammar.kind.name, seen.grammar.text) == ("REGEX", "a+")
    assert seen.scaled_logprobs == (engine.pb is not vllm_engine_pb2)  # SGLang reports them at the temperature


def test_unset_fields_are_neutral(vllm, target):
    vllm.stub.Generate(vllm.pb.GenerateRequest(text="A", sampling_params={"max_tokens": 1})).next()
    sampling = target.engine.seen[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.adjusts) == (1.0, 1.0, 0, False)


@pytest.mark.parametrize(
    ("constraint", "kind", "text"),
    [
        ({"json_schema": '{"type": "array"}'}, "JSON_SCHEMA", '{"type": "array"}'),
        ({"json_object": True}, "JSON_SCHEMA", '{"type": "object"}'),
        ({"grammar": 'start: "x"'}, "EBNF", 'start: "x"'),
        ({"choice": vllm_engine_pb2.ChoiceConstraint(choices=["yes", "no"])}, "EBNF", 'start: "yes" | "no"'),
    ],
)
def test_constraints(vllm, target, constraint, kind, text):
    vllm.whole(max_tokens=1, **constraint)
    assert (target.engine.seen[-1].grammar.kind.name, target.engine.seen[-1].grammar.text) == (kind, text)


def test_sglang_s_grammar(sglang, target):
    sglang.whole(max_new_tokens=1, ebnf_grammar='start: "x"')
    assert target.engine.seen[-1].grammar.text == 'start: "x"'


def test_a_truncated_prompt(vllm):
    assert vllm.whole([5, 6, *A], max_tokens=2, truncate_prompt_tokens=1).prompt_tokens == 1
    assert vllm.whole([5] * 500, max_tokens=2, truncate_prompt_tokens=-1).prompt_tokens == CONTEXT - 2


# --- ends ---


def test_stop_strings_and_tokens(engine):
    end = engine.whole(stop=["EF"], **{engine.limit: 20})
    assert list(end.output_ids) == expected(A, 5)
    assert (end.finish_reason, end.matched_stop_str) == ("stop", "EF")
    end = engine.whole(stop_token_ids=[A[0] + 3], **{engine.limit: 20})
    assert (end.finish_reason, end.matched_token_id, end.completion_tokens) == ("stop", A[0] + 3, 3)
    end = engine.whole([VOCAB - 2, VOCAB - 3], **{engine.limit: 20})
    assert (end.finish_reason, end.output_ids[-1]) == ("stop", EOS)


def test_the_rest_of_the_context_is_the_limit(engine):
    assert engine.whole([5] * 350, ignore_eos=True).completion_tokens == 50


def test_abort_ends_a_request(engine, target, monkeypatch):
    monkeypatch.setattr(target.engine, "delay", 0.1)
    messages = engine.ask(stream=True, name="long", ignore_eos=True)
    assert next(messages).HasField("chunk")
    engine.abort("long")
    end = list(messages)[-1].complete
    assert end.finish_reason == "abort"
    assert 0 < end.completion_tokens < 390
    engine.abort("unknown")
    until(lambda: target.sessions == 0)


@pytest.mark.parametrize("n", [1, 3])
def test_a_cancelled_call_ends_its_sessions(engine, target, draft, monkeypatch, n):
    monkeypatch.setattr(target.engine, "delay", 0.3)
    messages = engine.ask(stream=True, ignore_eos=True, n=n)
    next(messages)
    until(lambda: target.sessions == n)
    messages.cancel()
    until(lambda: target.sessions == 0 and draft.sessions == 0, seconds=30)  # the whole text takes 40 s


# --- log-probabilities ---


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(engine, stream):
    chunks, ends = engine.chunks_and_ends([20, *A], stream=stream, all_logprobs=2, **{engine.limit: 6})
    logprobs = ends[0].output_logprobs
    assert list(logprobs.token_logprobs) == [-(2 + i) / 4 for i in range(6)]
    assert list(logprobs.token_ids) == expected(A, 6)
    assert [list(top.values) for top in logprobs.top_logprobs] == [[-(2 + i) / 4, -(2 + i) / 4 - 1] for i in range(6)]
    assert [list(top.token_ids) for top in logprobs.top_logprobs] == [[t, t + 1] for t in expected(A, 6)]
    prompt = ends[0].input_logprobs
    assert list(prompt.token_ids) == [20, *A]
    assert [p.value if p.HasField("value") else None for p in prompt.token_logprobs] == [None, -0.25]
    assert [list(top.token_ids) for top in prompt.top_logprobs] == [[], [A[0], A[0] + 1]]
    if stream:
        assert [v for chunk in chunks for v in chunk.output_logprobs.token_logprobs] == list(logprobs.token_logprobs)
        assert chunks[0].input_logprobs == prompt
        assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])


def test_logprobs_of_the_tokens_only(vllm):
    end = vllm.whole(max_tokens=3, logprobs=0)
    assert len(end.output_logprobs.token_logprobs) == 3
    assert not end.output_logprobs.top_logprobs
    assert not end.HasField("input_logprobs")
    assert not vllm.whole(max_tokens=3).HasField("output_logprobs")


def test_sglang_returns_prompt_logprobs_from_a_position(sglang):
    prompt = [20, 30, 40, *A]
    logprobs = sglang.whole(prompt, all_logprobs=1, max_new_tokens=1, fields={"logprob_start_len": 2}).input_logprobs
    assert list(logprobs.token_ids) == prompt[2:]
    assert [p.value if p.HasField("value") else None for p in logprobs.token_logprobs] == [None, -0.75]
    assert not sglang.whole(all_logprobs=1, max_new_tokens=1, fields={"logprob_start_len": -1}).HasField(
        "input_logprobs"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_sglang_returns_prompt_logprobs_only(sglang, stream):
    chunks, (end,) = sglang.chunks_and_ends([20, 30, *A], stream=stream, all_logprobs=1, max_new_tokens=0)
    assert [(list(chunk.token_ids), chunk.completion_tokens) for chunk in chunks] == [([], 0)] * stream
    assert (list(end.output_ids), end.completion_tokens, end.finish_reason) == ([], 0, "length")
    assert [p.value for p in end.input_logprobs.token_logprobs] == [0, -0.25, -0.5]
    assert not end.HasField("output_logprobs")


# --- errors ---


def test_a_limit_that_vllm_refuses(vllm):
    code, message = refusal(vllm.ask(max_tokens=0))
    assert (code, "max_tokens must be 1 or more" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([], {}, "prompt"),
        ([VOCAB], {}, "token id"),
        ([5] * 500, {}, "context"),
        ([REFUSED], {}, "does not like"),
        (A, {"temperature": -1.0}, "temperature"),
        (A, {"top_p": 2.0}, "top_p"),
        (A, {"n": 129}, "n must"),
        (A, {"all_logprobs": 21}, "logprobs"),
        (A, {"regex": ""}, "regex"),
        (A, {"structural_tag": "{}"}, "structural_tag"),
        (A, {"fields": {"data_parallel_rank": 1}}, "one rank"),
        ([5] * (4 << 20), {}, "too large"),
    ],
)
def test_invalid_requests_name_the_field(engine, prompt, params, named):
    code, message = refusal(engine.ask(prompt, **params))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert named in message


def test_unsupported_fields_are_refused(vllm, sglang):
    pb = vllm.pb
    for fields in (
        {"mm_inputs": pb.MultimodalInputs()},
        {"media_refs": pb.MediaRefs()},
        {"kv_transfer_params_json": "{}"},
    ):
        assert refusal(vllm.ask(fields=fields))[0] is grpc.StatusCode.INVALID_ARGUMENT
    for fields in ({"lora_id": "x"}, {"input_embeds": [1.0]}, {"token_ids_logprob": [1]}):
        assert refusal(sglang.ask(fields=fields))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal(sglang.ask(custom_params={"other": 1}))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal(sglang.ask(logit_bias={"x": 1.0}))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal(vllm.stub.Generate(pb.GenerateRequest()))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_full_target_is_resource_exhausted(engine, target):
    code, message = refusal(engine.ask([BUSY], **{engine.limit: 1}))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "retry" in message
    until(lambda: target.sessions == 0)


def test_choices_that_do_not_all_fit_leave_no_session(folder, target, draft, monkeypatch):
    gateway = Gateway(folder, [target.address], [draft.address], max_pending_requests=2).wait()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
            engine = VllmClient(channel)
            code, message = refusal(engine.ask(n=3))  # independent of the waiting time
            assert (code, "at most 2" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            with monkeypatch.context() as slowly:
                slowly.setattr(target.engine, "delay", 0.05)
                other = engine.ask(stream=True, name="other", ignore_eos=True)
                next(other)
                assert refusal(engine.ask(n=2))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
                engine.abort("other")
                assert list(other)[-1].complete.finish_reason == "abort"
            assert engine.whole(max_tokens=2, n=2).completion_tokens == 2
    finally:
        assert gateway.stop() == 0


def test_unsupported_calls_are_unimplemented(engine):
    pb, stub = engine.pb, engine.stub
    calls = [(stub.Embed, pb.EmbedRequest()), (stub.StartProfile, common_pb2.StartProfileRequest()),
             (stub.StopProfile, common_pb2.StopProfileRequest())]  # fmt: skip
    if pb is sglang_scheduler_pb2:
        calls += [(stub.LoadLoRAAdapter, pb.LoadLoRAAdapterRequest())]
    for call, request in calls:
        assert refusal(lambda: call(request))[0] is grpc.StatusCode.UNIMPLEMENTED  # noqa: B023
    events = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    assert refusal(events)[0] is grpc.StatusCode.UNIMPLEMENTED


# --- facts ---


def test_health(engine):
    assert engine.stub.HealthCheck(engine.pb.HealthCheckRequest()).healthy


def test_the_model(engine):
    info = engine.stub.GetModelInfo(engine.pb.GetModelInfoRequest())
    assert (info.served_model_name, info.model_path, info.vocab_size) == ("counting", "counting", VOCAB)
    assert (info.max_context_length, list(info.eos_token_ids), info.is_generation) == (CONTEXT, [EOS], True)
    assert (list(info.architectures), info.bos_token_id, info.supports_vision) == (["Counting"], 0, False)


def test_the_server(engine):
    info = engine.stub.GetServerInfo(engine.pb.GetServerInfoRequest())
    assert info.uptime_seconds > 0
    assert info.active_requests == 0


def test_loads(engine, target, monkeypatch):
    monkeypatch.setattr(target.engine, "delay", 0.05)
    messages = engine.ask(stream=True, ignore_eos=True, n=2)
    for _ in range(4):
        next(messages)
    response = engine.stub.GetLoads(engine.pb.GetLoadsRequest())
    (load,) = response.loads
    assert load.num_total_reqs == load.num_running_reqs == 2
    assert (load.num_used_tokens, load.max_total_num_tokens, load.max_running_requests) == (2 * 16, 9 * 16, 64)
    assert load.token_usage == pytest.approx(2 / 9)
    messages.cancel()


def test_the_tokenizer_archive_is_complete(engine):
    parts = list(engine.stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(part.data for part in parts)
    assert [part.sha256 for part in parts] == [""] * (len(parts) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == tokenizer_files()


@pytest.fixture(scope="module")
def guarded(folder, target, draft):
    process = Gateway(folder, [target.address], [draft.address], api_key="secret", admin_api_key="boss").wait()
    yield process
    assert process.stop() == 0


# --- who may call ---


def test_facades_require_a_key(guarded):
    with grpc.insecure_channel(f"127.0.0.1:{guarded.grpc_port}") as channel:
        vllm = VllmClient(channel)
        assert vllm.stub.HealthCheck(vllm.pb.HealthCheckRequest()).healthy
        assert refusal(vllm.ask(max_tokens=1))[0] is grpc.StatusCode.UNAUTHENTICATED
        for call, request in (
            (vllm.stub.GetModelInfo, vllm.pb.GetModelInfoRequest()),
            (vllm.stub.Abort, vllm.pb.AbortRequest()),
        ):
            assert refusal(lambda: call(request))[0] is grpc.StatusCode.UNAUTHENTICATED  # noqa: B023
        key = [("authorization", "Bearer secret")]
        assert len(list(vllm.stub.Generate(vllm.request(max_tokens=1), metadata=key))) == 1
        # SGLang's facade is served only if it is requested.
        assert refusal(SglangClient(channel).ask(max_new_tokens=1))[0] is grpc.StatusCode.UNIMPLEMENTED
        flush = common_pb2.FlushCacheRequest()
        code, message = refusal(lambda: vllm.stub.FlushCache(flush, metadata=key))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "admin" in message


def test_facades_are_unavailable_before_a_target_is_up(folder):
    gateway = Gateway(folder, [f"127.0.0.1:{free_port()}"])
    try:
        with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
            vllm = VllmClient(channel)
            grpc.channel_ready_future(channel).result(60)
            code, message = refusal(lambda: vllm.stub.HealthCheck(vllm.pb.HealthCheckRequest()))
            assert (code, "waits for a target" in message) == (grpc.StatusCode.UNAVAILABLE, True)
            assert refusal(vllm.ask(max_tokens=1))[0] is grpc.StatusCode.UNAVAILABLE
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=NAMES[0]))
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        assert gateway.stop() == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_health_service_lists_the_facades(channel, name):
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def buf(*arguments):
    tool = shutil.which("buf") or str(Path(sys.executable).parent / "buf")
    command = [tool, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_reflection_lists_all_methods(gateway):
    listed = buf("--list-methods", f"http://127.0.0.1:{gateway.grpc_port}").split()
    assert {f"{name}/Generate" for name in [*NAMES, "outrider.wire.v1.GatewayService"]} <= set(listed)
    assert "grpc.health.v1.Health/Check" in listed


def test_calls_without_any_stub(gateway):
    server = f"http://127.0.0.1:{gateway.grpc_port}"
    request = {"tokenized": {"inputIds": A}, "samplingParams": {"temperature": 0, "maxTokens": 3}}
    output = json.loads(buf("-d", json.dumps(request), f"{server}/{NAMES[0]}/Generate"))
    assert output["complete"]["outputIds"] == expected(A, 3)
    own = {"text": "A", "maxTokens": 3, "temperature": 0}
    output = buf("-d", json.dumps(own), f"{server}/outrider.wire.v1.GatewayService/Generate")
    assert "FINISH_REASON_LENGTH" in output
