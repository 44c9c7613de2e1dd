"""Services that die and come back: clients notice a pause at most."""

import threading

import pytest

from tests.support.gateway.services import until
from tests.support.gateway.streaming import COUNT, PROMPT, Stream, started, system


def accepted(gateway):
    return gateway.metric("outrider_accepted_draft_tokens_total")


def until_accepted(gateway, count):
    """Stream until more than `count` draft tokens were accepted; on a loaded machine proposals are often late."""

    def enough():
        if accepted(gateway) > count:
            return True
        assert Stream(gateway).whole()
        return False

    until(enough, 60)


def test_clients_do_not_notice_a_draft_that_dies_and_comes_back(folder):
    with system(folder) as (gateway, _, [draft]):
        streams = [Stream(gateway) for _ in range(4)]
        for stream in streams:
            started(stream)
        draft.stop()
        until(lambda: gateway.client.get("/health").json()["status"] == "degraded")
        assert gateway.client.get("/health").status_code == 200
        assert gateway.text("A", max_tokens=3) == "BCD"
        draft.start()
        until(lambda: draft.engine.opened == 4)  # the running sessions are opened there again
        assert all(stream.whole() for stream in streams)
        until_accepted(gateway, accepted(gateway) + COUNT / 8)


def test_a_draft_session_that_is_lost_is_opened_again(folder):
    with system(folder) as (gateway, _, [draft]):
        stream = Stream(gateway)
        started(stream)
        draft.engine.lose(next(iter(draft.engine.sessions)))
        until(lambda: draft.engine.opened == 2)
        assert stream.whole()
        assert gateway.metric("outrider_reopened_sessions_total", service="draft") == 1


def test_a_draft_receives_whether_drafting_is_paused(folder):
    with system(folder) as (gateway, [target], [draft]):
        gateway.text("A", max_tokens=3)
        assert gateway.metric("outrider_drafting_paused") == 0
        target.engine.drafting_paused = True
        gateway.text("A", max_tokens=3)
        assert gateway.metric("outrider_drafting_paused") == 1
        gateway.text("A", max_tokens=3)
        until(lambda: draft.engine.opened == 3)
        assert [request.drafting_paused for request in draft.engine.seen] == [False, False, True]


def test_commits_are_gathered_while_drafting_is_paused(folder):
    with system(folder, delay=0.02) as (gateway, [target], [draft]):
        target.engine.drafting_paused = True
        stream = Stream(gateway)
        started(stream)

        def committed():
            (sequence,) = target.engine.sessions.values()
            return len(sequence.tokens)

        before, begun = draft.engine.frames, committed()
        until(lambda: draft.engine.frames >= before + 3)
        assert committed() - begun > 3 * (draft.engine.frames - before)  # some 10 steps share a frame
        target.engine.drafting_paused = False
        assert stream.whole()
        until_accepted(gateway, 0)
        assert gateway.metric("outrider_reopened_sessions_total", service="draft") == 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_target_that_dies_midway_changes_no_token(folder, temperature):
    with system(folder) as (gateway, [target], _):
        options = {"temperature": temperature, "seed": 3, "logprobs": 1, "echo": True}  # seed 3: a stride of 1
        streams = [Stream(gateway, **options) for _ in range(4)]
        for stream in streams:
            started(stream)
        target.stop()
        until(lambda: gateway.client.get("/health").status_code == 503)
        target.start()
        for stream in streams:
            stream.text = stream.text.removeprefix("A")
            assert stream.whole()
            assert stream.logprobs == [None, *(-(1 + i) / 4 for i in range(COUNT))]
        assert gateway.metric("outrider_reopened_sessions_total", service="target") == 4
        assert all(len(request.tokens) > 10 for request in target.engine.seen)


def test_a_full_target_sends_new_sessions_to_others(folder):
    with system(folder, targets=2, delay=0.002) as (gateway, targets, _):
        targets[0].engine.full = True
        streams = [Stream(gateway) for _ in range(4)]
        assert all(stream.whole() for stream in streams)
        assert targets[0].engine.opened == 0
        assert targets[1].engine.opened == 4
        targets[1].engine.full = True
        body = {"prompt": PROMPT, "max_tokens": 5}
        assert gateway.client.post("/v1/completions", json=body).status_code == 503


def test_requests_wait_for_a_target_that_is_restarting(folder):
    with system(folder) as (gateway, [target], _):
        target.stop()
        stream = Stream(gateway)
        threading.Event().wait(0.3)
        target.start()
        assert stream.whole()


def test_sessions_move_to_another_target(folder):
    with system(folder, targets=2) as (gateway, targets, [draft]):
        streams = [Stream(gateway) for _ in range(6)]
        for stream in streams:
            started(stream)
        assert [t.sessions for t in targets] == [3, 3]
        targets[0].stop()
        assert gateway.client.get("/health").status_code == 200
        assert all(stream.whole() for stream in streams)
        assert targets[1].engine.opened == 6
        assert draft.engine.opened == 6  # the draft needs no word of it


def test_proposals_reach_sessions_on_every_target(folder):
    with system(folder, targets=2, drafts=2) as (gateway, targets, drafts):
        streams = [Stream(gateway) for _ in range(8)]
        assert all(stream.whole() for stream in streams)
        assert [s.engine.opened for s in (*targets, *drafts)] == [4, 4, 4, 4]
        until_accepted(gateway, COUNT)


def test_a_target_that_comes_back_with_another_model_is_refused(folder):
    with system(folder, drafts=0) as (gateway, [target], _):
        stream = Stream(gateway)
        started(stream)
        target.stop()
        target.facts["fingerprint"] = "f2"
        target.start()
        until(lambda: "f2" in gateway.log.read_text())
        assert gateway.client.get("/health").status_code == 503
        assert target.engine.opened == 0
        target.stop()
        target.facts["fingerprint"] = "f1"
        target.start()
        assert stream.whole()


def test_shutting_down_ends_streams_with_an_error(folder):
    with system(folder, drafts=0, delay=0.3, drain_timeout=0.2) as (gateway, _, _):
        stream = Stream(gateway)
        until(lambda: stream.tokens)
        gateway.process.terminate()
        gateway.process.wait(20)
        stream.join(60)
        assert stream.error is not None
        assert stream.error["code"] == "unavailable"
