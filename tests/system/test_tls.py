"""Target, draft service and gateway started one by one, as on several machines: over TCP, each with a certificate."""

import contextlib
import signal
import ssl
import subprocess
import sys

import grpc
import httpx
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from outrider.cli import main
from outrider.client import Client
from outrider.errors import Unavailable
from outrider.tls import client_tls, open_blocking_channel
from outrider.wire.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tests.support.certificates import Authority
from tests.support.gateway.services import Gateway, free_port, until
from tests.support.tiny import write_model, write_tokenizer

pytestmark = pytest.mark.system

PROMPT = "a b a b a b"


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="module")
def server(ours):
    return ours.certificate("127.0.0.1")


@pytest.fixture(scope="module")
def visitor(ours):
    return ours.certificate("visitor.example")


@contextlib.contextmanager
def running(role, *flags):
    process = subprocess.Popen([sys.executable, "-m", "outrider", role, *map(str, flags)])
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.fixture(scope="module")
def services(tmp_path_factory, ours, server):
    """Addresses of a target and a draft service that require client certificates."""
    folder = write_tokenizer(write_model(tmp_path_factory.mktemp("model")))
    target, draft = (f"127.0.0.1:{free_port()}" for _ in range(2))
    shared = ["--max-running-requests", 8, *server.argv(ours.ca_certs)]
    with (
        running("target", "--listen", target, "--model-path", folder, "--device", "cpu", *shared),
        running("draft", "--listen", draft, "--speculative-algorithm", "NGRAM", *shared),
    ):
        yield target, draft


@pytest.fixture(scope="module")
def context(ours, visitor):
    made = ssl.create_default_context(cafile=ours.ca_certs)
    made.load_cert_chain(visitor.certfile, visitor.keyfile)
    return made


@pytest.fixture(scope="module")
def gateway(tmp_path_factory, services, ours, server, visitor, context):
    target, draft = services
    flags = visitor.flags("service_ssl", ours.ca_certs) | server.flags("ssl", ours.ca_certs)
    folder = tmp_path_factory.mktemp("gateway")
    made = Gateway(folder, [target], [draft], verify=context, gateway_workers=2, **flags).wait()
    until(lambda: "2 workers serve" in made.log.read_text(), 60)
    yield made
    assert made.stop() == 0


def test_requests_go_all_the_way(gateway, ours, visitor, context):
    until(lambda: gateway.metric("outrider_service_up", service="draft") == 2, 60)  # as each worker sees it
    text = gateway.text(PROMPT, max_tokens=30, ignore_eos=True)
    assert len(text) > 0
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    for _ in range(6):  # over connections of their own, which any worker may take
        answer = httpx.post(f"{gateway.url}/v1/completions", json=body, verify=context)
        assert answer.json()["choices"][0]["text"] == text
    with Client(f"127.0.0.1:{gateway.grpc_port}", tls=visitor.asking(ours.ca_certs)) as client:
        assert client.complete(PROMPT, max_tokens=30, temperature=0, ignore_eos=True).text == text


def test_routers_with_a_certificate_are_accepted(gateway, ours, visitor):
    address = f"127.0.0.1:{gateway.grpc_port}"
    with open_blocking_channel(address, [], visitor.asking(ours.ca_certs)) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=20).healthy
    with open_blocking_channel(address, [], client_tls(ours.ca_certs)) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_clients_without_a_certificate_are_refused(gateway, services, ours, visitor):
    def ask_target(channel):
        return target_pb2_grpc.TargetServiceStub(channel).GetTargetInfo(target_pb2.GetTargetInfoRequest(), timeout=20)

    def ask_draft(channel):
        return draft_pb2_grpc.DraftServiceStub(channel).GetDraftInfo(draft_pb2.GetDraftInfoRequest(), timeout=20)

    for address, ask in zip(services, (ask_target, ask_draft), strict=True):
        with open_blocking_channel(address, [], visitor.asking(ours.ca_certs)) as channel:
            assert ask(channel).software_version
        for tls in (None, client_tls(ours.ca_certs)):
            with open_blocking_channel(address, [], tls) as channel, pytest.raises(grpc.RpcError) as caught:
                ask(channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with Client(f"127.0.0.1:{gateway.grpc_port}") as client, pytest.raises(Unavailable):
        client.info()
    for verify in (ssl.create_default_context(cafile=ours.ca_certs), ssl.create_default_context()):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{gateway.url}/health", verify=verify)


def test_health_checks_need_a_certificate(services, ours, visitor):
    shown = ["--service-ssl-certfile", visitor.certfile, "--service-ssl-keyfile", visitor.keyfile]
    for address in services:
        asked = ["healthcheck", address, "--timeout", "20", "--service-ssl-ca-certs", ours.ca_certs]
        assert main([*asked, *shown]) == 0
        assert main(asked) == 1


def test_a_gateway_without_a_certificate_ends_with_the_reason(services, ours):
    target, draft = services
    ports = ["--port", str(free_port()), "--grpc-port", str(free_port()), "--service-ssl-ca-certs", ours.ca_certs]
    command = [sys.executable, "-m", "outrider", "gateway", "--target", target, "--draft", draft, *ports]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stderr
    assert f"the target at {target} asks for a certificate" in result.stderr
    assert "Traceback" not in result.stderr
