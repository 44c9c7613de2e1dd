"""A gateway that starts with empty pools, and whose replicas join and leave while requests run."""

import signal
import subprocess
import sys

import pytest

from tests.support.gateway.http import error_of
from tests.support.gateway.services import Draft, Gateway, Service, Target, answers, free_port, until
from tests.support.gateway.streaming import Stream, started


@pytest.fixture(scope="module")
def port():
    return free_port()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("pools") / "targets"


@pytest.fixture(scope="module")
def gateway(folder, file, port):
    """It knows a DNS name behind which nothing listens, and a file that does not exist."""
    process = Gateway(folder, [f"dns:127.0.0.1:{port}", f"file:{file}"], discovery_interval=0.1)
    until(lambda: answers(process, "/health/live") == 200, seconds=60)
    yield process
    assert process.stop() == 0


@pytest.fixture
def services(folder):
    """Starts services, which end with the test."""
    running = []

    def start(kind, name, **options):
        address = name if ":" in name else f"unix:{folder}/{name}"
        running.append(Service(kind, address, **options).start())
        return running[-1]

    yield start
    for service in running:
        service.stop()


def workers(gateway):
    """The replicas of both pools, by address."""
    body = gateway.client.get("/workers", headers=gateway.admin).json()
    return {worker["address"]: worker for worker in body["workers"]}


def state(gateway, service):
    found = workers(gateway).get(service.address)
    return found and found["state"]


def add(gateway, service, **body):
    answer = gateway.client.post("/workers", json={"url": service.address, **body}, headers=gateway.admin)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/workers/{answer.json()['worker_id']}"
    return answer.json()["worker_id"]


def remove(gateway, name, **options):
    answer = gateway.client.delete(f"/workers/{name}", params=options, headers=gateway.admin)
    assert answer.status_code == 202, answer.text


def clear(gateway):
    for worker in workers(gateway).values():
        if "api" in worker["sources"] and worker["state"] != "draining":
            remove(gateway, worker["id"], drain=False)


def test_replicas_join_a_gateway_that_started_without_any(gateway, services, file, port):
    """This test comes first: no target has been up yet."""
    refused = gateway.client.post("/v1/completions", json={"prompt": "A"})
    assert error_of(refused, 503)
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    body = gateway.client.get("/workers", headers=gateway.admin).json()
    assert {worker["address"]: worker["state"] for worker in body["workers"]}[f"127.0.0.1:{port}"] == "unreachable"
    (failed,) = body["failed_sources"]
    assert (failed["source"], "No such file" in failed["reason"]) == (f"file:{file}", True)
    assert gateway.client.get("/workers").status_code == 401
    target = services(Target, "first", delay=0.01)
    found = add(gateway, target)
    until(lambda: answers(gateway, "/readiness") == 200)
    assert answers(gateway, "/liveness") == 200
    assert gateway.text("A", max_tokens=3) == "BCD"
    worker = gateway.client.get(f"/workers/{found}", headers=gateway.admin).json()
    assert (worker["url"], worker["worker_type"], worker["is_healthy"]) == (target.address, "regular", True)
    assert (worker["sources"], worker["model_id"], worker["max_sessions"]) == (["api"], "counting", 64)
    draft = services(Draft, "draft")
    add(gateway, draft, worker_type="draft")
    until(lambda: state(gateway, draft) == "ready")
    gateway.complete("A", max_tokens=50)
    until(lambda: draft.engine.opened == 1)
    clear(gateway)
    until(lambda: not {target.address, draft.address} & workers(gateway).keys())


def test_targets_of_a_file_and_of_a_name_take_over_and_texts_stay_the_same(gateway, services, file, port):
    targets = [services(Target, name, delay=0.015) for name in ("a", "b", f"127.0.0.1:{port}")]
    file.write_text(f"{targets[0].address}\n")
    until(lambda: state(gateway, targets[0]) == "ready")
    until(lambda: state(gateway, targets[2]) == "ready")
    assert workers(gateway)[targets[2].address]["sources"] == [f"dns:127.0.0.1:{port}"]
    streams = [Stream(gateway) for _ in range(6)]
    for stream in streams:
        started(stream)
    assert [target.sessions for target in targets] == [3, 0, 3]
    file.write_text(f"{targets[1].address}  # instead of the other\n")
    until(lambda: state(gateway, targets[1]) == "ready" and state(gateway, targets[0]) is None)
    assert targets[0].sessions == 0
    remove(gateway, targets[2].address)  # the API prevails while the name lasts
    until(lambda: state(gateway, targets[2]) is None)
    assert targets[1].sessions == 6
    assert all(stream.whole() for stream in streams)
    assert gateway.text("A", max_tokens=3) == "BCD"
    file.write_text("")
    until(lambda: state(gateway, targets[1]) is None)
    error = error_of(gateway.client.post("/v1/completions", json={"prompt": "A"}), 503)
    assert "its pool is empty" in error["message"]
    health = gateway.client.get("/health").json()
    assert (health["status"], health["missing"]) == ("unavailable", ["target: the pool is empty"])


def test_a_last_target_ends_its_sessions_and_takes_no_others(gateway, services, file):
    target, other = services(Target, "last", delay=0.01), services(Target, "other", delay=0.01)
    gateway.client.post(f"/add_worker?url={target.address}", headers=gateway.admin).raise_for_status()
    until(lambda: state(gateway, target) == "ready")
    listed = gateway.client.get("/list_workers", headers=gateway.admin).json()
    assert listed == {"urls": [target.address]}
    streams = [Stream(gateway) for _ in range(2)]
    for stream in streams:
        started(stream)
    removed = gateway.client.post(f"/remove_worker?url={target.address}", headers=gateway.admin)
    assert (removed.status_code, removed.text) == (200, f"Successfully removed worker: {target.address}")
    assert state(gateway, target) == "draining"
    assert answers(gateway, "/readiness") == 503
    refused = gateway.client.post("/v1/completions", json={"prompt": "A"})
    assert error_of(refused, 503)["message"].startswith("the gateway has no target: its pool is empty")
    assert refused.headers["retry-after"]
    add(gateway, other)
    assert all(stream.whole() for stream in streams)
    assert other.engine.opened == 2
    until(lambda: state(gateway, target) is None)
    clear(gateway)


# A target process around a fake engine.
PROCESS = """
import sys

from outrider.config import TargetConfig
from outrider.process import process
from outrider.transport.rpc import serve_engine
from tests.support.gateway.services import Target, model_info

def register(server, hub, loop):
    Target(hub, model_info()).register(server.server)
    return (Target.name,)

async def serve(config):
    return await serve_engine(
        lambda: Target.engine_class(0.015), config.listen, *Target.coders, register, drain=config.drain_timeout
    )

sys.exit(process.run("target", TargetConfig(listen=sys.argv[1], drain_timeout=60), serve))
"""


def test_a_target_that_is_stopped_serves_until_its_sessions_have_moved(gateway, services, folder):
    address, other = f"unix:{folder}/stopped", services(Target, "other-of-stopped", delay=0.01)
    with subprocess.Popen([sys.executable, "-c", PROCESS, address]) as process:
        try:
            process.address = address
            add(gateway, process)
            until(lambda: state(gateway, process) == "ready")
            streams = [Stream(gateway) for _ in range(2)]
            for stream in streams:
                started(stream)
            process.send_signal(signal.SIGTERM)
            until(lambda: state(gateway, process) == "draining")
            assert answers(gateway, "/readiness") == 503
            assert process.poll() is None
            add(gateway, other)
            assert process.wait(20) == 0
            assert all(stream.is_alive() for stream in streams)
            assert all(stream.whole() for stream in streams)
            assert other.engine.opened == 2
        finally:
            process.kill()
    clear(gateway)


@pytest.mark.parametrize(
    ("kind", "facts", "words"),
    [
        (Target, {"fingerprint": "f2"}, "serves counting, fingerprint f2; the model that this gateway serves is"),
        (Target, {"dtype": "bfloat16"}, "--dtype bfloat16"),
        (Draft, {"vocab_hash": "v2"}, "hash v2, not v1"),
    ],
)
def test_a_late_replica_that_does_not_fit_is_refused(gateway, services, kind, facts, words):
    service = services(kind, f"strange-{next(iter(facts))}", **facts)
    add(gateway, service, worker_type=kind.__name__.lower())
    until(lambda: state(gateway, service) == "refused")
    assert words in workers(gateway)[service.address]["reason"]
    remove(gateway, service.address)
    until(lambda: state(gateway, service) is None)
    assert service.engine.opened == 0


def test_an_unreachable_replica_is_retried(gateway, services):
    nowhere = Service(Target, f"127.0.0.1:{free_port()}")
    add(gateway, nowhere)
    until(lambda: state(gateway, nowhere) == "unreachable" and workers(gateway)[nowhere.address]["reason"])
    target = services(Target, nowhere.address)
    until(lambda: state(gateway, target) == "ready")
    assert gateway.client.get("/list_workers", headers=gateway.admin).json() == {"urls": [f"grpc://{target.address}"]}
    clear(gateway)


@pytest.mark.parametrize(
    ("method", "route", "body", "status", "words"),
    [
        ("POST", "/workers", {"url": "http://a:1"}, 400, "services speak gRPC"),
        ("POST", "/workers", {"url": "nonsense"}, 400, "HOST:PORT"),
        ("POST", "/workers", {"url": "a:1", "worker_type": "prefill"}, 400, "send target or draft"),
        ("POST", "/add_worker?url=dns:a:1", None, 400, "--target"),
        ("GET", "/workers/nowhere:1", None, 404, "no replica"),
        ("DELETE", "/workers/00000000-0000-0000-0000-000000000000", None, 404, "no replica"),
        ("POST", "/remove_worker?url=nowhere:1", None, 400, "no replica"),
    ],
)
def test_wrong_calls(gateway, method, route, body, status, words):
    answer = gateway.client.request(method, route, json=body, headers=gateway.admin)
    assert words in error_of(answer, status)["message"]
    assert gateway.client.request(method, route, json=body).status_code == 401
