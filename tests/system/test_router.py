"""A real target and draft service behind the services of other engines' routers, and, if installed, behind `smg`."""

import json
import os
import shutil
import subprocess

import grpc
import httpx
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from services.draft.drafters.ngram import NgramDrafter, NgramOptions
from tests.support.gateway.services import ADMIN, Gateway, free_port, until
from tests.support.system.services import draft_service, target_service
from tests.support.tiny import write_model, write_tokenizer

pytestmark = pytest.mark.system

SMG = os.environ.get("SMG") or shutil.which("smg")
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Ulm"]}}, "required": ["city"]}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    base = tmp_path_factory.mktemp("router")
    folder = write_tokenizer(write_model(base / "model", seed=1, max_position_embeddings=2048))
    service = target_service(folder, f"unix:{base}/target").start()
    yield service
    service.stop()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory, target):
    base = tmp_path_factory.mktemp("gateway")
    draft = draft_service(f"unix:{base}/draft", NgramDrafter(NgramOptions())).start()
    gateway = Gateway(base, [target.address], [draft.address]).wait()
    yield gateway
    for service in (gateway, draft):
        service.stop()


@pytest.fixture(scope="module")
def engine(gateway):
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def ask(engine, prompt=PROMPT, *, stream=False, **params):
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=prompt), stream=stream, sampling_params=pb.SamplingParams(**params)
    )
    return list(engine.Generate(request, timeout=60))


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("stream", [False, True])
def test_the_same_tokens_as_over_rest(engine, gateway, temperature, stream):
    numbers = {"temperature": temperature, "top_p": 0.9, "seed": 5, "max_tokens": 60, "repetition_penalty": 1.1}
    messages = ask(engine, stream=stream, ignore_eos=True, **numbers)
    rest = gateway.complete(PROMPT, ignore_eos=True, return_token_ids=True, **numbers)["choices"][0]
    assert list(messages[-1].complete.output_ids) == rest["token_ids"]
    assert len(rest["token_ids"]) == 60
    if stream:
        assert [t for m in messages for t in m.chunk.token_ids] == rest["token_ids"]


def test_the_answer_matches_its_schema(engine, gateway):
    (message,) = ask(engine, temperature=1, seed=2, max_tokens=200, json_schema=json.dumps(SCHEMA))
    *tokens, _ = message.complete.output_ids  # the last one ended it
    text = gateway.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert json.loads(text)["city"] in ("Bonn", "Ulm")
    with pytest.raises(grpc.RpcError) as caught:
        ask(engine, max_tokens=5, regex="(")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_logprobs_are_those_of_rest(engine, gateway):
    (message,) = ask(engine, temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=0)
    reported = gateway.complete(PROMPT, max_tokens=5, logprobs=2)["choices"][0]["logprobs"]
    assert list(message.complete.output_logprobs.token_logprobs) == pytest.approx(reported["token_logprobs"])
    assert len(message.complete.input_logprobs.token_logprobs) == len(PROMPT)


def test_the_cache_is_flushed_once_nothing_runs(engine, target):
    prompt = [*range(20, 60)]
    assert ask(engine, prompt, max_tokens=1)[0].complete.cached_tokens == 0
    assert ask(engine, prompt, max_tokens=1)[0].complete.cached_tokens > 0
    target.pause = 0.02  # it is not over before it is cancelled
    stream = engine.Generate(
        pb.GenerateRequest(text="a", stream=True, sampling_params=pb.SamplingParams(max_tokens=1000, ignore_eos=True))
    )
    next(stream)
    administrator = [("authorization", f"Bearer {ADMIN}")]
    refused = engine.FlushCache(common_pb2.FlushCacheRequest(), metadata=administrator)
    assert (refused.success, bool(refused.message)) == (False, True)
    stream.cancel()
    target.pause = 0.0
    assert engine.FlushCache(common_pb2.FlushCacheRequest(timeout_s=20), metadata=administrator).success
    assert ask(engine, prompt, max_tokens=1)[0].complete.cached_tokens == 0


@pytest.fixture(scope="module")
def router(gateway, tmp_path_factory):
    """URL of smg with the gateway as its only worker."""
    port, log = free_port(), tmp_path_factory.mktemp("smg") / "log"
    command = [SMG, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-urls", f"grpc://127.0.0.1:{gateway.grpc_port}", "--policy", "round_robin"]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        try:
            until(lambda: process.poll() is not None or "Successfully loaded tokenizer" in log.read_text(), 100)
            assert process.poll() is None, log.read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.mark.skipif(SMG is None, reason="smg is not installed; SMG may say where it is")
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "seed": 7, "n": 2},
        {"temperature": 0, "stop": ["e"]},
        {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ],
)
def test_the_router_returns_the_gateways_answers(gateway, router, options):
    model = gateway.client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "weather?"}], "max_tokens": 40, **options}
    answers = [httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json() for url in (gateway.url, router)]
    # smg leaves out a character that is not complete when an answer ends; we say that there is one.
    reported = [
        [(choice["message"]["content"].rstrip("\ufffd"), choice["finish_reason"]) for choice in answer["choices"]]
        for answer in answers
    ]
    assert reported[0] == reported[1]
    usage = [(answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) for answer in answers]
    assert usage[0] == usage[1]
