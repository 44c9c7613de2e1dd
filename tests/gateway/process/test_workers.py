"""Several gateway processes on one port: ports, requests, metrics and draining."""

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.exposition import merge
from gateway.telemetry.metrics import Metrics
from gateway.workers.parent import answer_health, reserved_ports, worker_config
from gateway.workers.peers import Peers
from outrider.client import Client
from outrider.config import GatewayConfig
from outrider.errors import ConfigError, Unavailable
from outrider.placement.cores import plan_cores
from outrider.supervisor.health import is_healthy
from outrider.transport.rpc import GrpcServer
from tests.support.gateway.engines import expected
from tests.support.gateway.router_clients import SglangClient, VllmClient
from tests.support.gateway.services import Draft, Gateway, Service, Target, free_port, until
from tests.support.gateway.streaming import PROMPT

WORKERS = 2


@pytest.fixture(scope="module")
def gateway(folder, target, draft):
    flags = {"gateway_workers": WORKERS, "drain_timeout": 20, "grpc_facades": ["vllm", "sglang"]}
    process = Gateway(folder, [target.address], [draft.address], **flags).wait()
    until(lambda: process.metric("outrider_worker_up") == WORKERS, 60)
    until(lambda: f"{WORKERS} workers serve" in process.log.read_text())
    yield process
    assert process.stop() == 0


def ask(gateway, route="/v1/completions", **body):
    """A request over a new connection, which any worker may accept."""
    return httpx.post(gateway.url + route, json=body, timeout=30)


def complete(gateway, count=5):
    answer = ask(gateway, prompt=PROMPT, temperature=0, max_tokens=count, ignore_eos=True, return_token_ids=True)
    return answer.json()["choices"][0]["token_ids"]


def pids(gateway):
    """Process ids of the workers, by index."""
    found = {}
    for path in Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children").read_text().split():
        words = Path(f"/proc/{path}/cmdline").read_text().split("\0")
        found[int(words[words.index("gateway.process.worker") + 1])] = int(path)
    return found


def declared_twice(page):
    """Families that a page declares more than once, which readers may refuse."""
    names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    return {name for name in names if names.count(name) > 1}


def test_all_workers_serve_and_every_scrape_covers_all(gateway):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: complete(gateway), range(24)))
    assert answers == [expected(PROMPT, 5)] * 24
    by_worker = [gateway.metric("outrider_generated_tokens_total", worker=worker) for worker in range(WORKERS)]
    assert min(by_worker) > 0
    assert sum(by_worker) == 24 * 5
    for _ in range(6):
        page = httpx.get(gateway.url + "/metrics").text
        assert not declared_twice(page)
        families = {family.name: family for family in text_string_to_metric_families(page)}
        requests = families["outrider_requests"].samples
        assert sum(sample.value for sample in requests if sample.name == "outrider_requests_total") == 24
        samples = [sample for family in families.values() for sample in family.samples]
        assert {sample.labels["worker"] for sample in samples} == {"0", "1"}
        assert len({(s.name, tuple(sorted(s.labels.items()))) for s in samples}) == len(samples)


def test_workers_share_the_grpc_port(gateway):
    served = set()
    for _ in range(30):
        before = [gateway.metric("outrider_prompt_tokens_total", worker=worker) for worker in range(WORKERS)]
        with Client(f"127.0.0.1:{gateway.grpc_port}") as client:
            assert client.complete("A", max_tokens=3, temperature=0.0).text == "BCD"
        after = [gateway.metric("outrider_prompt_tokens_total", worker=worker) for worker in range(WORKERS)]
        served |= {worker for worker in range(WORKERS) if after[worker] > before[worker]}
        if len(served) == WORKERS:
            return
    raise AssertionError(f"only workers {served} were asked")


def test_an_abort_reaches_requests_of_all_workers(gateway, target, monkeypatch):
    until(lambda: target.sessions == 0)  # sessions of another test must not count
    monkeypatch.setattr(target.engine, "delay", 0.1)
    ends = []

    def generate(name):
        answer = ask(gateway, prompt=PROMPT, max_tokens=300, ignore_eos=True, rid=name)
        ends.append(answer.json()["choices"][0]["finish_reason"])

    threads = [threading.Thread(target=generate, args=[name]) for name in ("a1", "a2", "b1", "b2", "b3", "c")]
    for thread in threads:
        thread.start()
    until(lambda: target.sessions == 6)
    found = [ask(gateway, "/abort_request", rid=name).json()["aborted_requests"] for name in ("a1", "a2")]
    assert found == [1, 1]
    everything = httpx.post(f"{gateway.url}/abort_request", json={"abort_all": True}, headers=gateway.admin)
    assert everything.json()["aborted_requests"] == 4
    for thread in threads:
        thread.join(60)
    assert ends == ["abort"] * 6


@pytest.mark.parametrize("kind", [VllmClient, SglangClient])
def test_a_router_s_abort_reaches_requests_of_all_workers(gateway, target, monkeypatch, kind):
    until(lambda: target.sessions == 0)  # sessions of another test must not count
    monkeypatch.setattr(target.engine, "delay", 0.1)
    names = [f"far-{i}" for i in range(8)]
    bodies = [{"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "rid": name} for name in names]
    with (
        concurrent.futures.ThreadPoolExecutor(len(names)) as pool,
        grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
    ):
        answers = [pool.submit(ask, gateway, **body) for body in bodies]
        until(lambda: target.sessions == len(names))
        for name in names:
            kind(channel).abort(name)
        ends = [answer.result().json()["choices"][0]["finish_reason"] for answer in answers]
    assert ends == ["abort"] * len(names)


def test_a_worker_that_dies_is_restarted_and_the_others_continue(gateway):
    before = pids(gateway)
    assert sorted(before) == [0, 1]
    os.kill(before[0], signal.SIGKILL)
    until(lambda: gateway_up(gateway) == [0, 1])
    for _ in range(10):
        assert complete(gateway) == expected(PROMPT, 5)  # by the other worker, or by both
    until(lambda: gateway_up(gateway) == [1, 1], 60)
    after = pids(gateway)
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert "the worker 0 process ended" in gateway.log.read_text()


def test_replicas_join_and_leave_in_all_workers(gateway, folder, target):
    """Also in one that was restarted meanwhile."""
    late = Service(Target, f"unix:{folder}/joins", delay=0.01).start()

    def workers():
        found = httpx.get(f"{gateway.url}/workers", headers=gateway.admin).json()["workers"]
        return {worker["address"]: worker for worker in found}

    def up(address):
        return gateway.metric("outrider_service_up", address=address)

    try:
        httpx.post(f"{gateway.url}/workers", json={"url": late.address}, headers=gateway.admin).raise_for_status()
        until(lambda: up(late.address) == WORKERS)
        assert workers()[late.address]["sources"] == ["api"]
        os.kill(pids(gateway)[1], signal.SIGKILL)
        until(lambda: gateway_up(gateway) == [1, 1] and up(late.address) == WORKERS, 60)
        name = workers()[target.address]["id"]
        removed = httpx.delete(f"{gateway.url}/workers/{name}", headers=gateway.admin)
        assert removed.status_code == 202
        until(lambda: target.address not in workers())
        assert up(target.address) == 0
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda _: complete(gateway), range(12))) == [expected(PROMPT, 5)] * 12
        assert late.engine.opened >= 12
        httpx.post(f"{gateway.url}/workers", json={"url": target.address}, headers=gateway.admin).raise_for_status()
        until(lambda: up(target.address) == WORKERS)
        httpx.post(f"{gateway.url}/remove_worker?url={late.address}", headers=gateway.admin).raise_for_status()
        until(lambda: late.address not in workers())
    finally:
        late.stop()


def gateway_up(gateway):
    with contextlib.suppress(httpx.TransportError):  # the connections of a dead worker are lost
        page = httpx.get(gateway.url + "/metrics").text
        rows = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("outrider_worker_up{"))
        return [float(rows[f'outrider_worker_up{{worker="{worker}"}}']) for worker in range(WORKERS)]


def listeners(port):
    """Listening sockets of this machine at a port."""
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in map(str.split, lines))


def test_clients_of_a_draining_worker_continue_with_the_others(folder):
    slow = Service(Target, f"unix:{folder}/drained", delay=0.05).start()
    gateway = Gateway(folder, [slow.address], [], gateway_workers=WORKERS, drain_timeout=120).wait()
    until(lambda: gateway.metric("outrider_worker_up") == WORKERS, 60)
    old = [Client(f"127.0.0.1:{gateway.grpc_port}") for _ in range(6)]
    kept = [httpx.Client(base_url=gateway.url, timeout=30) for _ in range(6)]

    def grpc(client):
        return client.complete("A", max_tokens=1, temperature=0.0).text == "B"

    def rest(client):
        return client.post("/v1/completions", json={"prompt": "A", "max_tokens": 1}).is_success

    assert all(map(grpc, old))
    assert all(map(rest, kept))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, gateway, 300)
        until(lambda: gateway.metric("outrider_running_requests"))
        slow.engine.delay = 1.0  # it outlasts this test
        busy = next(w for w in range(WORKERS) if gateway.metric("outrider_running_requests", worker=w))
        os.kill(pids(gateway)[busy], signal.SIGTERM)
        for port in (gateway.port, gateway.grpc_port):
            until(lambda port=port: listeners(port) == WORKERS - 1)
        slow.engine.delay = 0.1
        for _ in range(10):
            with Client(f"127.0.0.1:{gateway.grpc_port}") as new:
                assert grpc(new)
        assert all(map(rest, kept))
        for client in old:  # they receive it soon
            with contextlib.suppress(Unavailable):
                grpc(client)
        assert all(map(grpc, old))
        assert not answer.done()
        slow.engine.delay = 0.0
        assert answer.result() == expected(PROMPT, 300)
    for client in (*old, *kept):
        client.close()
    assert gateway.stop() == 0
    slow.stop()


def test_all_drain_at_once(folder, draft):
    slow = Service(Target, f"unix:{folder}/slow", delay=0.2).start()  # no request ends before all are admitted
    gateway = Gateway(folder, [slow.address], [], gateway_workers=WORKERS, drain_timeout=25).wait()
    until(lambda: gateway.metric("outrider_worker_up") == WORKERS, 60)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(complete, gateway, 60) for _ in range(6)]
        until(lambda: slow.sessions == 6)
        slow.engine.delay = 0.03
        began = time.monotonic()
        gateway.process.terminate()
        assert [answer.result() for answer in answers] == [expected(PROMPT, 60)] * 6
    assert gateway.process.wait(20) == 0
    assert time.monotonic() - began < 25
    assert gateway.stop() == 0
    slow.stop()


def test_the_parent_is_healthy_while_any_worker_serves(folder):
    only = Service(Target, f"unix:{folder}/only").start()
    address = f"unix:{folder}/parent-health"
    gateway = Gateway(folder, [only.address], [], gateway_workers=WORKERS, health_listen=address)

    def healthy():
        return asyncio.run(is_healthy(address))

    until(healthy, 120)
    until(lambda: f"{WORKERS} workers serve" in gateway.log.read_text(), 60)
    only.stop()  # without it no new worker serves
    for pid in pids(gateway).values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not healthy(), 60)
    only.start()
    until(healthy, 120)
    assert gateway.stop() == 0
    only.stop()


async def test_the_parent_is_not_healthy_while_its_workers_drain(tmp_path):
    server, worker = GrpcServer(), GrpcServer()
    await server.start(f"unix:{tmp_path}/parent", ())
    await worker.start(f"unix:{tmp_path}/worker", ())
    await worker.set_serving(True)
    child = SimpleNamespace(pid=1, address=f"unix:{tmp_path}/worker")
    answering = asyncio.create_task(answer_health([child], server))
    async with asyncio.timeout(30):
        while not await is_healthy(f"unix:{tmp_path}/parent"):
            await asyncio.sleep(0.01)
    answering.cancel()  # as `supervise` does on a stop
    await asyncio.wait([answering])
    assert not await is_healthy(f"unix:{tmp_path}/parent")
    await server.stop(0)
    await worker.stop(0)


def test_a_required_draft_that_does_not_fit_ends_all_workers(folder, target):
    other = Service(Draft, f"unix:{folder}/other-draft", vocab_hash="v2").start()
    gateway = Gateway(folder, [target.address], [other.address], gateway_workers=WORKERS, require_draft=True)
    assert gateway.process.wait(60) == 2
    assert "error: the vocabularies" in gateway.log.read_text().splitlines()[-1]
    gateway.stop()
    other.stop()


@pytest.mark.parametrize("shared", [False, True])
def test_ports_in_use_are_refused(shared):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = GatewayConfig(port=free_port(), grpc_port=other.getsockname()[1])
        with pytest.raises(ConfigError, match="--grpc-port"), reserved_ports(config):
            pass


def test_zero_workers_are_refused():
    with pytest.raises(ConfigError, match="--gateway-workers"):
        GatewayConfig(gateway_workers=0).check()


def test_flags_of_a_worker(tmp_path):
    config = GatewayConfig(gateway_workers=3, max_pending_requests=100, niceness=5, health_listen="0.0.0.0:1",
                           control_socket="/run/c")  # fmt: skip
    found = [worker_config(config, index, tmp_path) for index in range(3)]
    assert [one.max_pending_requests for one in found] == [34] * 3
    assert [one.disable_draft_self_test for one in found] == [False, True, True]
    assert len({one.health_listen for one in found}) == 3
    assert [one.control_socket for one in found] == ["/run/c", None, None]  # only one process can listen there
    assert all((one.gateway_workers, one.niceness) == (1, 0) for one in found)
    assert len(plan_cores(range(16), "NGRAM", 3).gateway) == 3
    assert len(plan_cores(range(4), "NGRAM", 3).gateway) == 1


def test_pages_are_merged():
    page = (
        '# HELP a A.\n# TYPE a counter\na_total{x="1 2"} 3.0\na_total{x="{"} 4.0\n# HELP b B.\n# TYPE b gauge\nb 1.0\n'
    )
    merged = merge({2: page, 0: page.replace("b 1.0\n", "")}, 3).splitlines()
    assert merged[2:5] == [f'outrider_worker_up{{worker="{worker}"}} {up}' for worker, up in enumerate((1.0, 0.0, 1.0))]
    assert merged[5:] == [
        "# HELP a A.", "# TYPE a counter",
        'a_total{worker="0",x="1 2"} 3.0', 'a_total{worker="0",x="{"} 4.0',
        'a_total{worker="2",x="1 2"} 3.0', 'a_total{worker="2",x="{"} 4.0',
        "# HELP b B.", "# TYPE b gauge", 'b{worker="2"} 1.0',
    ]  # fmt: skip


def test_a_family_without_samples_in_one_worker_is_declared_once():
    fresh = "# HELP a A.\n# TYPE a counter\n# HELP b B.\n# TYPE b gauge\nb 1.0\n"
    used = fresh.replace("counter\n", "counter\na_total 3.0\n")
    for pages, worker in (({0: fresh, 1: used}, 1), ({0: used, 1: fresh}, 0)):
        assert merge(pages, 2).splitlines()[4:] == [
            "# HELP a A.", "# TYPE a counter", f'a_total{{worker="{worker}"}} 3.0',
            "# HELP b B.", "# TYPE b gauge", 'b{worker="0"} 1.0', 'b{worker="1"} 1.0',
        ]  # fmt: skip


def test_pages_of_the_gateway_itself_declare_every_family_once():
    used, fresh = Metrics(), Metrics()
    used.requests.labels("length").inc()
    page = merge({0: fresh.render().decode(), 1: used.render().decode()}, 2)
    assert not declared_twice(page)
    families = {line.split()[2] for line in fresh.render().decode().splitlines() if line.startswith("# TYPE")}
    assert families < {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}


async def test_peers_answer_and_absent_ones_are_omitted(tmp_path):
    workers = [Peers(index, 3, tmp_path) for index in range(3)]
    for worker in workers[:2]:
        await worker.serve({"double": lambda number: number * 2, "name": lambda _, own=worker: own.index})
    assert await workers[0].ask("double", 21) == {1: 42}
    assert await workers[2].ask("name") == {0: 0, 1: 1}
    assert await workers[0].ask("unknown") == {}
    await workers[1].stop()
    again = Peers(1, 3, tmp_path)
    await again.serve({"double": lambda number: number * 3})
    assert await workers[0].ask("double", 1) == {1: 3}
    assert await Peers().ask("double", 1) == {}
    for worker in (*workers, again):
        await worker.stop()
