"""The whole system over TCP, with two targets and two drafts: proposals cross gRPC and are accepted, sessions are
spread, and killed services change nothing but speed."""

import concurrent.futures
import os
import signal

import httpx
import pytest

from tests.support.gateway.services import until
from tests.support.outrider.children import free_port
from tests.support.system.serve import PROMPTS, System, processes_of

pytestmark = pytest.mark.system

PROMPT, LENGTH = "a b a b a b", 120
FRAMES = "outrider_stream_frames_total"


@pytest.fixture
def system(folder):
    addresses = [f"127.0.0.1:{free_port(2)}" for _ in range(2)]
    tree = ["--speculative-num-steps", "4", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "5"]
    # Cores of its own, as far as the flags say: a niced draft would never be in time beside other tests.
    cores = sorted(os.sched_getaffinity(0))
    places = ["--cores-target", str(cores[0]), "--cores-draft", str(cores[-1])]
    flags = ["--speculative-algorithm", "NGRAM", "--self-speculation", "off", *tree, *places]
    flags += ["--dp-size", "2", "--draft-replicas", "2"]  # SGLang's name of --target-replicas
    system = System(folder, "--listen-target", addresses[0], "--listen-draft", addresses[1], *flags).wait()
    yield system
    assert system.stop() == 0


def accepted(system):
    return system.metric("outrider_accepted_draft_tokens_total")


def replicas(system):
    info = httpx.get(f"{system.url}/get_server_info").json()
    return [*info["targets"], *info["drafts"]]


def one_replica_dies(system):
    """Of both services, while all replicas have sessions: none is lost, and those that died are started again."""
    prompts = PROMPTS[:4]
    whole = [system.ask(prompt, max_tokens=LENGTH) for prompt in prompts]
    before = {role: processes_of(system.process, role) for role in ("target", "draft")}
    assert [len(processes) for processes in before.values()] == [2, 2]
    targets = [link["address"] for link in replicas(system)[:2]]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(system.ask, prompt, max_tokens=LENGTH) for prompt in prompts]
        until(lambda: all(system.metric("outrider_engine_running_sessions", address=one) > 0 for one in targets), 30)
        for first, _ in before.values():
            os.kill(first, signal.SIGKILL)
        assert [answer.result() for answer in answers] == whole
    assert system.metric("outrider_reopened_sessions_total", service="target") > 0
    until(lambda: [link["state"] for link in replicas(system)] == ["ready"] * 4, 90)
    for role, (dead, other) in before.items():
        after = processes_of(system.process, role)
        assert len(after) == 2
        assert dead not in after
        assert other in after


def test_proposals_cross_grpc_and_killed_services_change_nothing_but_speed(system):
    plain_text = system.ask(PROMPT, max_tokens=LENGTH, speculation={"sources": []})
    assert accepted(system) == 0
    assert system.ask(PROMPT, max_tokens=LENGTH) == plain_text
    until(lambda: system.ask(PROMPT, max_tokens=LENGTH) == plain_text and accepted(system) > 0, 60)

    for stream in ("target", "draft"):
        for direction in ("sent", "received"):
            labels = {"stream": stream, "direction": direction, "transport": "grpc"}
            assert system.metric(FRAMES, **labels) > 0, labels
            assert system.metric("outrider_stream_bytes_total", **labels) > system.metric(FRAMES, **labels)
    assert system.metric(FRAMES, transport="socket") == 0
    until(lambda: [link.get("stream_transport") for link in replicas(system)] == ["grpc"] * 4, 60)

    one_replica_dies(system)

    before = accepted(system)
    until(lambda: system.ask(PROMPT, max_tokens=LENGTH) == plain_text and accepted(system) > before, 60)
    assert system.metric(FRAMES, transport="socket") == 0
