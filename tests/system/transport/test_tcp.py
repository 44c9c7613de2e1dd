"""The whole system over TCP: proposals cross gRPC and are accepted, and killed services change nothing but speed."""

import os
import signal

import httpx
import pytest

from tests.support.gateway.services import until
from tests.support.outrider.children import free_port
from tests.support.system.serve import System, processes_of

pytestmark = pytest.mark.system

PROMPT, LENGTH = "a b a b a b", 120
FRAMES = "outrider_stream_frames_total"


@pytest.fixture
def system(folder):
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    tree = ["--speculative-num-steps", "4", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "5"]
    flags = ["--speculative-algorithm", "NGRAM", "--self-speculation", "off", *tree]
    system = System(folder, "--listen-target", addresses[0], "--listen-draft", addresses[1], *flags).wait()
    yield system
    assert system.stop() == 0


def accepted(system):
    return system.metric("outrider_accepted_draft_tokens_total")


def streamed(system, *kills):
    """The text of a streamed answer during which processes are killed, by role and number of chunks before."""
    due, text = dict(kills), ""
    for count, chunk in enumerate(system.ask(PROMPT, stream=True, max_tokens=LENGTH)):
        text += chunk.choices[0].text if chunk.choices else ""
        if (role := due.pop(count, None)) is not None:
            for process in processes_of(system.process, role):
                os.kill(process, signal.SIGKILL)
    assert not due, "the answer ended before the processes were killed"
    return text


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
    info = httpx.get(f"{system.url}/get_server_info").json()
    assert [link["stream_transport"] for link in (*info["targets"], *info["drafts"])] == ["grpc", "grpc"]

    assert streamed(system, (5, "draft"), (12, "target")) == plain_text
    assert system.metric("outrider_reopened_sessions_total", service="target") > 0
    system.wait()
    before = accepted(system)
    until(lambda: system.ask(PROMPT, max_tokens=LENGTH) == plain_text and accepted(system) > before, 60)
    assert system.metric(FRAMES, transport="socket") == 0
