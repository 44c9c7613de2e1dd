"""`outrider ray` on a cluster of local Ray nodes: real services, lost nodes, replicas by load, ranks on two nodes.

A node is a raylet with its own processes. Starts take most of the time, so the steps of a pool's life are one test.
"""

import contextlib
import importlib.util
import json
import os
import signal
import threading

import httpx
import pytest

from outrider.service_token import new_token
from tests.support.gateway.services import free_port, metric_of, until
from tests.support.ray_cluster import RayCluster, command_lines, pid_of
from tests.support.tiny import write_model, write_tokenizer

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    # Of Ray's own code in this process, which leaves files and processes to the garbage collector.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='needs ray: pip install "outrider[ray]"'),
]

CLIENTS = 6  # more than the sessions of one target
TOKEN, ADMIN = new_token(), new_token()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def cluster():
    made = RayCluster()
    try:
        made.add("a", "b")
        yield made
    finally:
        made.stop()


def stream(url, client, tokens=400):
    """The text of a streamed completion; temperature and prompt depend on the client."""
    body = {"prompt": f"hello {client}", "max_tokens": tokens, "temperature": float(client % 2), "seed": 7,
            "ignore_eos": True, "stream": True}  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        chunks = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)


class Load:
    """Clients that stream the same completions again and again. wrong: what did not end with its text."""

    def __init__(self, url, texts):
        self.url, self.texts = url, texts
        self.ended = threading.Event()
        self.right, self.wrong = 0, []
        self.threads = [threading.Thread(target=self._run, args=(client,)) for client in range(CLIENTS)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        for thread in self.threads:
            thread.join()

    def _run(self, client):
        while not self.ended.is_set():
            try:
                text = stream(self.url, client)
            except Exception as error:
                text = repr(error)
            if text == self.texts[client]:
                self.right += 1
            else:
                self.wrong.append((client, text))


def reopened_sessions(url):
    """Sessions that were opened again on another target."""
    return metric_of(httpx.get(f"{url}/metrics").text, "outrider_reopened_sessions_total", service="target")


def ready(states):
    return [unit for unit, state in states.items() if state == "ready"]


def address_of(pool, unit):
    return next(one["address"] for one in pool["units"] if one["unit"] == unit)


def test_the_life_of_a_pool(cluster, folder):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    replicas = ("--target-replicas", "1:2", "--target-cpus", "2", "--draft-replicas", "1", "--port", str(port))
    scaling = ("--scale-up-seconds", "1", "--scale-down-seconds", "2")
    sizes = ("--max-running-requests", "4", "--max-total-tokens", "4096", "--grpc-port", "0")
    model = ("--model-path", str(folder), "--speculative-algorithm", "NGRAM")
    # What cannot start is reported, and leaves nothing behind.
    _, shown = cluster.outrider("up", "--model-path", str(folder / "absent"), *model[2:], *replicas, *sizes, code=2)
    assert "target-0 does not start" in shown
    assert str(folder / "absent") in shown

    secrets = {"OUTRIDER_SERVICE_TOKEN": TOKEN, "OUTRIDER_ADMIN_API_KEY": ADMIN}
    _, shown = cluster.outrider("up", *model, *replicas, *scaling, *sizes, **secrets)
    assert f"the pool outrider serves at {url}/v1" in shown

    # Secrets reach the processes, and no command line shows them.
    assert not [line for line in command_lines().values() if TOKEN in line or ADMIN in line]
    assert httpx.get(f"{url}/workers").status_code in (401, 403)
    workers = httpx.get(f"{url}/workers", headers={"Authorization": f"Bearer {ADMIN}"}).json()["workers"]
    assert {one["worker_type"]: one["state"] for one in workers} == {"regular": "ready", "draft": "ready"}
    _, refused = cluster.outrider("up", *model, code=2)
    assert "the cluster has a pool outrider already" in refused

    texts = [stream(url, client) for client in range(CLIENTS)]
    with Load(url, texts) as load:
        # A queue brings a second target.
        until(lambda: len(ready(cluster.states())) == 2, 90)

        # A process that dies is started again at its address.
        pool = cluster.status()
        os.kill(pid_of("draft", address_of(pool, "draft-0")), signal.SIGKILL)
        until(lambda: [one["restarts"] for one in cluster.status()["units"] if one["kind"] == "draft"] == [1], 60)

        # A node is lost in the middle of streams; another one joins, and takes the target that was lost.
        gateway = cluster.node_of(pid_of("gateway", str(port)))
        nodes = {unit: cluster.node_of(pid_of("target", address_of(pool, unit))) for unit in ("target-0", "target-1")}
        lost = next(node for node in nodes.values() if node != gateway)
        reopened = reopened_sessions(url)
        cluster.kill(lost)
        cluster.add("c")
        until(lambda: set(cluster.states().values()) != {"ready"}, 60)
        until(lambda: len(ready(cluster.states())) == 2, 120)
        before = load.right
        until(lambda: load.right > before + CLIENTS, 60)
    assert load.wrong == []
    assert reopened_sessions(url) > reopened

    # Without load the second target leaves; no session is left in any engine.
    until(lambda: len(cluster.states()) == 1, 60)
    until(lambda: [one["sessions"] for one in cluster.status()["units"]] == [0, 0, 0], 30)
    assert [stream(url, client) for client in range(CLIENTS)] == texts

    cluster.outrider("down")
    assert not [line for line in command_lines().values() if str(folder) in line and "outrider target" in line]
    _, none = cluster.outrider("status", code=2)
    assert "the cluster has no pool outrider" in none


def test_ranks_on_two_nodes_start_again_together(cluster, folder):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    ranks = ("--tp-size", "2", "--nnodes", "2", "--target-cpus", "2", "--speculative-algorithm", "NONE")
    flags = ("--name", "ranks", "--model-path", str(folder), "--port", str(port), "--grpc-port", "0")
    cluster.outrider("up", *flags, *ranks, "--max-total-tokens", "4096")
    first, second = (pid_of("target", words) for words in ("--listen", "--node-rank 1"))
    nodes = [cluster.node_of(pid) for pid in (first, second)]
    assert nodes[0] != nodes[1]  # a bundle each, and both of one placement group
    text = stream(url, 0, 20)

    gateway = cluster.node_of(pid_of("gateway", str(port)))
    cluster.add("d")
    cluster.kill(next(node for node in nodes if node != gateway))
    until(lambda: set(cluster.states("ranks").values()) != {"ready"}, 60)
    until(lambda: set(cluster.states("ranks").values()) == {"ready"}, 120)
    until(lambda: cluster.status("ranks")["serves"], 60)
    assert stream(url, 0, 20) == text
    with contextlib.suppress(ProcessLookupError):  # both ranks have started anew
        os.kill(first, 0)
        raise AssertionError("rank 0 has not started again")
    cluster.outrider("down", "--name", "ranks")
