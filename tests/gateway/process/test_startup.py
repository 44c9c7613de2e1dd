"""Invalid flags and services are refused at start-up: one clear line and exit code 2."""

import asyncio
import socket
import subprocess
import sys
from types import SimpleNamespace

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.process import waiting
from gateway.process.app import serve
from gateway.process.waiting import first_target
from gateway.streams.availability import Availability, ReplicaState
from gateway.streams.draft import DraftLink
from gateway.streams.replica.absence import Absence
from gateway.workers.parent import supervise_workers
from outrider.client import Client
from outrider.config import GatewayConfig, parse_flags
from outrider.errors import ConfigError, Unavailable
from outrider.process.ports import take_port
from outrider.transport.statuses import statuses
from outrider.wire.v1 import common_pb2, draft_pb2, target_pb2
from tests.support.gateway.services import Draft, Gateway, Service, Target, answers, free_port, refused, until


@pytest.mark.parametrize(
    ("facts", "words"),
    [({"vocab_hash": "v2"}, ["v1", "v2"]), ({"vocab_hash": "", "vocab_size": 299}, ["299", "300"])],
)
def test_a_required_draft_with_another_vocabulary_is_refused(folder, target, facts, words):
    draft = Service(Draft, f"unix:{folder}/strange", **facts).start()
    try:
        output = refused("--target", target.address, "--draft", draft.address, "--require-draft")
        assert "vocabular" in output
        assert all(word in output for word in words)
    finally:
        draft.stop()


def test_a_required_draft_that_does_not_come_ends_the_gateway(folder, target):
    flags = "--draft", f"unix:{folder}/absent", "--require-draft", "--connect-timeout", 1
    assert "the draft at" in refused("--target", target.address, *flags, code=1)


def grpc_health(gateway, service=""):
    """True if the gateway's gRPC health service reports SERVING for a name."""
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def states(gateway):
    """What /health says of the drafts, which /server_info and the metrics say as well."""
    body = gateway.client.get("/health").json()
    info = gateway.client.get("/server_info").json()
    (draft,) = body["drafts"]
    same = {name: info["drafts"][0][name] for name in draft} == draft
    if not same or not gateway.metric("outrider_service_state", service="draft", state=draft["state"]):
        return None, None, "it changes, or they differ"
    return body["status"], draft["state"], draft["reason"]


def test_a_draft_with_another_vocabulary_is_not_used_until_it_fits(folder, target):
    draft = Service(Draft, f"unix:{folder}/other", vocab_hash="v2").start()
    gateway = Gateway(folder, [target.address], [draft.address])
    try:
        until(lambda: answers(gateway, "/health/ready") == 200, seconds=60)
        until(lambda: states(gateway)[1] == "refused")
        status, _, reason = states(gateway)
        assert status == "degraded"
        assert "hash v2, not v1" in reason
        assert any("hash v2" in line for line in gateway.client.get("/health").json()["missing"])
        assert answers(gateway, "/health") == answers(gateway, "/health/live") == 200
        assert grpc_health(gateway)
        assert not grpc_health(gateway, draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name)
        assert gateway.text("A", max_tokens=3) == "BCD"
        draft.stop()
        draft.facts.clear()
        draft.start()
        gateway.wait()
        assert states(gateway) == ("ok", "ready", None)
        until(lambda: grpc_health(gateway, draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name))
        gateway.complete("A", max_tokens=50)
        until(lambda: draft.engine.opened == 1)
    finally:
        assert gateway.stop() == 0
        draft.stop()


def test_a_draft_that_cannot_load_says_why(folder, target):
    reason = "the draft cannot be loaded: there is no folder /x"
    draft = Service(FailingDraft, f"unix:{folder}/failing").start()
    gateway = Gateway(folder, [target.address], [draft.address])
    try:
        until(lambda: answers(gateway, "/health/ready") == 200, seconds=60)
        until(lambda: states(gateway) == ("degraded", "failed", reason))
        until(lambda: gateway.log.read_text().count(reason) == 1)
        assert gateway.text("A", max_tokens=3) == "BCD"
    finally:
        assert gateway.stop() == 0
        draft.stop()


def test_the_supervisor_s_report_is_the_reason_of_a_draft_that_ended(folder, target):
    report = folder / "draft.report"
    gateway = Gateway(folder, [target.address], [f"unix:{folder}/gone"], draft_report=report)
    try:
        until(lambda: answers(gateway, "/health/ready") == 200, seconds=60)
        until(lambda: states(gateway)[:2] == ("degraded", "unreachable"))
        assert "No such file" in states(gateway)[2]
        report.write_text("the draft process ended with SIGKILL")
        assert states(gateway)[2] == "the draft process ended with SIGKILL"
        report.unlink()
    finally:
        assert gateway.stop() == 0


def test_a_gateway_that_loses_its_target_is_not_ready_over_grpc_either(folder):
    own = Service(Target, f"unix:{folder}/own").start()
    gateway = Gateway(folder, [own.address]).wait()
    try:
        until(lambda: grpc_health(gateway))
        own.stop()
        until(lambda: not grpc_health(gateway))
        assert [answers(gateway, f"/health{path}") for path in ("", "/ready", "/live")] == [503, 503, 200]
        body = gateway.client.get("/health").json()
        assert (body["status"], body["targets"][0]["state"]) == ("unavailable", "unreachable")
        own.start()
        until(lambda: grpc_health(gateway))
    finally:
        assert gateway.stop() == 0
        own.stop()


class FailingDraft(Draft):
    async def GetDraftInfo(self, request, context):
        async with statuses(context):
            raise ConfigError("the draft cannot be loaded: there is no folder /x")


def test_targets_with_different_models(folder, target):
    other = Service(Target, f"unix:{folder}/other", fingerprint="f2").start()
    try:
        output = refused("--target", target.address, other.address)
        assert "f1" in output
        assert "f2" in output
    finally:
        other.stop()


def test_targets_with_different_updates_of_one_model(folder):
    """One of them is unused until the next update, which requires a running gateway."""
    targets = [
        Service(Target, f"unix:{folder}/{name}", fingerprint=name, first="f1").start() for name in ("f1", "f2", "f3")
    ]
    gateway = Gateway(folder, [target.address for target in targets])
    try:
        until(lambda: gateway.log.read_text().count("; update the target's weights") == 2, seconds=120)
        until(lambda: answers(gateway, "/health") == 200)  # "degraded": the pool lacks two of its targets
        assert gateway.text("A", max_tokens=3) == "BCD"
        assert sum(link["up"] for link in gateway.client.get("/server_info").json()["targets"]) == 1
    finally:
        assert gateway.stop() == 0
        for target in targets:
            target.stop()


class Comes:
    """A link to a target that is up after a while."""

    def __init__(self, turns, fingerprint):
        self.turns, self.up, self.info = turns, False, None
        self.absence = Absence("target", "unix:/nowhere", None)
        model = common_pb2.ModelInfo(fingerprint=fingerprint)
        self.facts = target_pb2.GetTargetInfoResponse(model=model, first_fingerprint="f1")

    async def come(self, changed):
        for _ in range(self.turns):
            await asyncio.sleep(0)
        self.up, self.info = True, self.facts
        self.absence.settled.set()
        changed.set()


@pytest.mark.parametrize(
    ("come", "expected"),
    [([(1, "f1"), (50, "f2")], "f2"), ([(50, "f1"), (1, "f2")], "f2"), ([(1, "f1"), (50, "f1")], "f1")],
)
async def test_updated_weights_are_preferred(come, expected):
    targets = [Comes(*one) for one in come]
    links = SimpleNamespace(changed=asyncio.Event(), is_named=lambda _: True)
    tasks = [asyncio.create_task(target.come(links.changed)) for target in targets]
    first = await first_target(targets, links, 60)
    assert first.facts.model.fingerprint == expected
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("state", "levels", "words"),
    [
        (ReplicaState.STARTING, ["INFO", "INFO"], "is not up yet (compiling 3/12); text is decoded plainly"),
        (ReplicaState.UNREACHABLE, ["INFO", "WARNING"], "is not up yet (compiling 3/12); text is decoded plainly"),
        (ReplicaState.FAILED, ["WARNING"], "is not used; text is decoded plainly"),
        (ReplicaState.REFUSED, ["WARNING"], "is not used; text is decoded plainly"),
    ],
)
async def test_a_draft_that_starts_normally_is_no_warning(caplog, monkeypatch, state, levels, words):
    """The models of some take longer to compile than the target takes to load."""
    monkeypatch.setattr(waiting, "WARN_AFTER", 0.01)
    monkeypatch.setattr(waiting, "_START_UP", 0.02)
    link = DraftLink("unix:nowhere", None)
    link.absence.reason = Availability(state, "compiling 3/12")
    with caplog.at_level("INFO", "gateway.process.waiting"):
        await waiting.connect_draft(link, None)
    assert [record.levelname for record in caplog.records] == levels
    assert all(words in record.message for record in caplog.records)


def test_a_checkpoint_without_tokenizer(folder):
    bare = Service(Target, f"unix:{folder}/empty", files={"config.json": b"{}"}).start()
    try:
        assert "tokenizer.json" in refused("--target", bare.address)
    finally:
        bare.stop()


def test_a_host_of_ipv6(folder, target):
    gateway = Gateway(folder, [target.address], host="::1")
    gateway.client.close()
    gateway.client = httpx.Client(base_url=f"http://[::1]:{gateway.port}", timeout=30)
    try:
        gateway.wait()
        assert gateway.text("A", max_tokens=3) == "BCD"
        with Client(f"[::1]:{gateway.grpc_port}") as client:
            assert client.info().served_model_name
    finally:
        assert gateway.stop() == 0


def test_no_target_in_time(folder):
    assert "target" in refused("--target", f"unix:{folder}/absent", "--connect-timeout", 1, code=1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--api-key", ""], "--api-key is empty"),
        (["--served-model-name", ""], "--served-model-name is empty"),
        (["--max-body-bytes", 0], "--max-body-bytes must be"),
        (["--max-pending-requests", 0], "--max-pending-requests must be"),
        (["--max-requests-per-key", 0], "--max-requests-per-key must be"),
        (["--request-timeout", 0], "--request-timeout must be"),
        (["--port", 99999], "--port 99999 is no port"),
        (["--port", 0], "--port 0 is no port"),
        (["--grpc-port", -3], "--grpc-port -3 is no port"),
        (["--port", 31000, "--grpc-port", 31000], "--port and --grpc-port are both 31000"),
        (["--health-listen", "127.0.0.1:65536"], "65536 is no port"),
        (["--health-listen", "127.0.0.1:0"], " 0 is no port"),
    ],
)
@pytest.mark.parametrize(("workers", "run"), [(1, serve), (2, supervise_workers)])
async def test_invalid_flags_are_refused(flags, words, workers, run):
    """In this process; the first of them also as a user starts it."""
    ports = ["--port", free_port(), "--grpc-port", free_port()]
    argv = [*ports, "--target", "unix:nowhere", "--gateway-workers", workers, *flags]
    with pytest.raises(ConfigError) as caught:
        await run(parse_flags(GatewayConfig, list(map(str, argv)), "outrider gateway"))
    assert words in caught.value.message
    if flags[0] == "--api-key":
        command = [sys.executable, "-m", "gateway", *map(str, argv)]
        result = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert result.returncode == 2
        assert words in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_port_in_use(target, flag):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        output = refused("--target", target.address, flag, port)
        assert str(port) in output
        assert "in use" in output


def test_of_two_concurrent_starts_on_a_port_the_second_is_refused(monkeypatch):
    """Both bind the port before either listens."""
    port, bind = free_port(), socket.socket.bind

    with socket.socket() as other:

        def at_once(taken, address):
            bind(taken, address)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bind(other, address)
            other.listen()

        monkeypatch.setattr(socket.socket, "bind", at_once)
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            take_port("127.0.0.1", port, "--port", listens=True)


def test_an_absent_draft_is_logged_and_used_when_it_is_up(folder, target):
    draft = Service(Draft, f"unix:{folder}/late")
    gateway = Gateway(folder, [target.address], [draft.address])
    try:
        until(lambda: gateway.log.exists() and "draft" in gateway.log.read_text(), seconds=60)
        until(lambda: answers(gateway, "/health") == 200, seconds=60)
        assert gateway.client.get("/health").json()["status"] == "degraded"
        assert gateway.text("A", max_tokens=3) == "BCD"
        draft.start()
        gateway.wait()
        gateway.complete("A", max_tokens=50)
        until(lambda: draft.engine.opened == 1)
    finally:
        assert gateway.stop() == 0
        draft.stop()


def test_a_gateway_without_a_target_lives_but_is_not_ready(folder):
    gateway = Gateway(folder, [f"unix:{folder}/absent"])
    try:
        until(lambda: answers(gateway, "/health/live") == 200, seconds=60)
        for path in ("/health", "/health/ready", "/health_generate"):
            assert answers(gateway, path) == 503
        refused = gateway.client.post("/v1/completions", json={"prompt": "A"})
        assert refused.status_code == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        with Client(f"127.0.0.1:{gateway.grpc_port}") as client, pytest.raises(Unavailable) as caught:
            client.info()
        assert 1 <= caught.value.retry_after <= 60
    finally:
        assert gateway.stop() == 0


def test_the_gateway_needs_no_numeric_framework():
    names = "{'torch', 'jax', 'transformers'}"
    code = (
        f"import sys, gateway.process.app, gateway.grpc.service; sys.exit(repr({names} & set(sys.modules)) != 'set()')"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
