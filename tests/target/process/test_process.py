"""The target as a process: its flags, its port, and its gRPC service."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import PROTOCOL_VERSION
from outrider.checkpoints import checkpoint
from outrider.errors import InvalidRequest
from outrider.serving.loop import EngineLoop
from outrider.serving.messages import Message
from outrider.speculation.proposal import FinishReason
from outrider.transport.rpc import GrpcServer
from outrider.transport.statuses import RETRY_AFTER
from outrider.transport.stream import StreamHub
from outrider.wire import codec
from outrider.wire.v1 import target_pb2, target_pb2_grpc
from services.target.process.app import main
from services.target.process.service import TargetServicer
from tests.support.target.driving import chain, engine_of, load_model, opening, run
from tests.support.tiny import VOCAB, write_model, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_tokenizer(write_model(tmp_path_factory.mktemp("model")))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    # Larger than one part of the stream.
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    (folder / "special_tokens_map.json").write_text(json.dumps({"filler": "x" * (1 << 20)}))
    return folder


def start(*flags):
    return subprocess.Popen([sys.executable, "-m", "services.target", *flags], stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def address(folder, tmp_path_factory):
    """A running target, ended by a signal: it must go with code 0."""
    address = f"unix:{tmp_path_factory.mktemp('socket')}/target.sock"
    process = start("--model-path", str(folder), "--listen", address, "--max-total-tokens", "4096", "--cores", "0")
    yield address
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert "ready on" in log


async def connected(channel):
    """Wait until the service reports SERVING."""
    health = health_pb2_grpc.HealthStub(channel)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            answer = await health.Check(health_pb2.HealthCheckRequest(service="outrider.wire.v1.TargetService"))
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return target_pb2_grpc.TargetServiceStub(channel)
        except grpc.aio.AioRpcError:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError("not ready in time")


async def test_info_has_the_handshake_fields(address, folder):
    async with grpc.aio.insecure_channel(address) as channel:
        info = await (await connected(channel)).GetTargetInfo(target_pb2.GetTargetInfoRequest())
    assert info.protocol_version == PROTOCOL_VERSION
    assert info.model.vocab_size == VOCAB
    assert info.model.fingerprint == checkpoint.fingerprint(folder)
    assert info.model.vocab_hash == checkpoint.vocab_hash(folder) != ""
    assert (info.model.architecture, info.model.dtype) == ("LlamaForCausalLM", "float32")
    assert list(info.eos_token_ids) == [1]
    assert (info.max_session_tokens, info.max_running_sessions, info.page_size) == (512, 48, 16)


async def test_tokenizer_files_arrive_completely(address, folder):
    async with grpc.aio.insecure_channel(address) as channel:
        files = await tokenizer_files(await connected(channel))
    assert set(files) == {
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json",
        "chat_template.json", "additional_chat_templates/tool_use.jinja",
    }  # fmt: skip
    for name, content in files.items():
        assert content == (folder / name).read_bytes()


async def test_a_target_that_loads_offers_its_tokenizer(folder, tmp_path):
    servicer, server, address = TargetServicer(None, None), GrpcServer(), f"unix:{tmp_path}/target.sock"
    await server.start(address, servicer.register(server))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        for call in (lambda: stub.GetTargetInfo(target_pb2.GetTargetInfoRequest()), lambda: tokenizer_files(stub)):
            with pytest.raises(grpc.aio.AioRpcError, match="loading its model") as refusal:
                await call()
            assert dict(refusal.value.trailing_metadata())[RETRY_AFTER] == "1"
        servicer.offer_tokenizer(folder)
        assert (await tokenizer_files(stub))["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    await server.stop(0)


async def tokenizer_files(stub):
    files = {}
    async for part in stub.GetTokenizer(target_pb2.GetTokenizerRequest()):
        assert len(part.content) <= 1 << 20
        files[part.file_name] = files.get(part.file_name, b"") + part.content
    return files


async def test_a_stream_of_sessions_with_proposals(address, folder):
    requests = [opening(i, list(range(3, 3 + i)), max_tokens=16) for i in range(1, 6)]
    expected = run(engine_of(load_model(folder)), requests)
    new = {request.session_id: [] for request in requests}
    async with grpc.aio.insecure_channel(address) as channel:
        stream = (await connected(channel)).Verify()
        bad = opening(9, [VOCAB + 1])
        await stream.write(codec.verify_request_to_pb(Message(opens=[*requests, bad])))
        finished, refused = {}, {}
        while len(finished) < len(requests):
            output = codec.verify_response_from_pb(await stream.read())
            refused |= {failure.session_id: failure.error for failure in output.failures}
            drafts = []
            for commit in output.commits:
                new[commit.session_id] += commit.tokens.tolist()
                if commit.finish_reason != FinishReason.RUNNING:
                    finished[commit.session_id] = commit.finish_reason
                    continue
                done = len(new[commit.session_id])
                path = [*requests[commit.session_id - 1].tokens.tolist(), *new[commit.session_id]]
                drafts.append(chain(commit.session_id, path, expected.new[commit.session_id][done : done + 4]))
            if drafts:
                await stream.write(codec.verify_request_to_pb(Message(proposals=drafts)))
        await stream.done_writing()
    assert new == expected.new
    assert set(finished.values()) == {FinishReason.LENGTH}
    assert set(refused) == {9}
    assert isinstance(refused[9], InvalidRequest)


async def test_a_frame_that_cannot_be_read_ends_its_stream_alone(address):
    async with grpc.aio.insecure_channel(address) as channel:
        stub = await connected(channel)
        stream = stub.Verify()
        await stream.write(target_pb2.VerifyRequest(closes=b"123"))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        other = stub.Verify()
        await other.write(codec.verify_request_to_pb(Message(opens=[opening(1, [5], max_tokens=1)])))
        assert len(codec.verify_response_from_pb(await other.read()).commits) == 1
        await other.done_writing()


async def test_calls_before_the_model_is_loaded_are_unavailable():
    hub = StreamHub(EngineLoop(lambda _: None), codec.verify_request_from_pb, codec.verify_response_to_pb)
    servicer = TargetServicer(hub, EngineLoop(lambda _: None))
    server = grpc.aio.server()
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest())
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "loading" in error.value.details()
    await server.stop(None)


def test_a_port_in_use_is_reported_before_the_model_is_loaded(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start("--model-path", str(folder), "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "error: cannot listen" in log
    assert "Traceback" not in log
    assert "loading" not in log


@pytest.mark.parametrize(("flags", "words"), [
    (["--model-path", "/nowhere/at/all"], "there is no folder"),
    (["--cores", "0-4000"], "may not use core"),
    (["--cores", "many"], "no list of cores"),
])  # fmt: skip
def test_settings_that_do_not_fit_end_with_one_line(tmp_path, capsys, flags, words):
    assert main([*flags, "--listen", f"unix:{tmp_path}/socket"]) == 2
    error = capsys.readouterr().err
    assert error.strip().splitlines()[-1].startswith("error: ")
    assert words in error
    assert "Traceback" not in error


def test_unknown_flags_end_with_code_2():
    with pytest.raises(SystemExit) as error:
        main(["--pagesize", "3"])
    assert error.value.code == 2


async def _generate(address):
    async with grpc.aio.insecure_channel(address) as channel:
        call = (await connected(channel)).Verify()
        request = opening(1, [5, 6, 7], max_tokens=30)
        await call.write(codec.verify_request_to_pb(Message(opens=[request])))
        async for response in call:
            message = codec.verify_response_from_pb(response)
            if any(commit.finish_reason for commit in message.commits):
                return


@pytest.mark.parametrize("level", ["info", "warning"])
def test_a_target_logs_its_steps_and_its_memory_unless_the_level_is_higher(folder, tmp_path, level):
    address = f"unix:{tmp_path}/target.sock"
    flags = ["--decode-log-interval", "5", "--log-level", level, "--max-total-tokens", "4096", "--cores", "0"]
    process = start("--model-path", str(folder), "--listen", address, *flags)
    try:
        asyncio.run(_generate(address))
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    lines = ["memory of cpu: ", "Prefill batch. #new-seq: 1, #new-token: 3, ", "Decode batch. #running-req: "]
    assert [line in log for line in lines] == [level == "info"] * 3, log
