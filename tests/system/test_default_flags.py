"""`outrider serve` with default flags and the default model: a draft service whose proposals go over gRPC."""

import os
import signal
import time

import httpx
import pytest

from tests.support.gateway.services import until
from tests.support.system.serve import System, processes_of

pytestmark = pytest.mark.system

FRAMES = "outrider_stream_frames_total"

# A text that repeats itself: what every drafter can predict.
_PROMPT = "one two three four five six seven eight nine ten. " * 6


@pytest.fixture(scope="module")
def system():
    system = System("default").wait()
    yield system
    assert system.stop() == 0


def test_a_draft_service_is_up(system):
    until(lambda: httpx.get(f"{system.url}/health").json()["drafts"], 60)
    info = httpx.get(f"{system.url}/get_server_info").json()
    assert [draft["up"] for draft in info["drafts"]] == [True]
    assert info["draft_sources"]["draft"]["running"]


def test_proposals_of_the_draft_service_are_accepted_and_change_no_text(system):
    plain = system.ask(_PROMPT, speculation={"sources": []})
    deadline = time.monotonic() + 60
    while not by_source(system)["draft"]["accepted_draft_tokens"] and time.monotonic() < deadline:
        assert system.ask(_PROMPT, speculation={"sources": ["draft"]}) == plain
    counts = by_source(system)["draft"]
    assert 0 < counts["accepted_draft_tokens"] <= counts["verified_draft_tokens"]
    assert system.ask(_PROMPT) == plain


def by_source(system):
    return httpx.get(f"{system.url}/get_server_info").json()["draft_sources"]


def test_all_frames_go_over_grpc(system):
    system.ask(_PROMPT, speculation={"sources": ["draft"]})
    assert system.metric(FRAMES, transport="grpc") > 0
    assert system.metric(FRAMES, transport="socket") == 0


def test_a_killed_draft_service_changes_only_the_speed(system):
    whole = system.ask(_PROMPT, max_tokens=200)
    (draft,) = processes_of(system.process, "draft")
    stream = system.ask(_PROMPT, stream=True, max_tokens=200)
    text = next(stream).choices[0].text
    os.kill(draft, signal.SIGKILL)
    text += "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text == whole
    assert system.ask(_PROMPT, max_tokens=200) == whole
    until(lambda: by_source(system)["draft"]["running"], 60)  # the supervisor has started another one
