"""The engine loop, around an engine whose tokens can be computed by hand."""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from outrider.errors import EngineFault, InvalidRequest, Unavailable
from outrider.process.garbage_collection import frozen_heap
from outrider.serving.loop import EngineLoop
from outrider.serving.messages import Message, StepOutput
from outrider.speculation.proposal import Commit, FinishReason
from outrider.transport.hang_watch import watch_engine
from outrider.transport.rpc import GrpcServer
from tests.support.outrider.counting import CountingEngine, request


class Sink:
    """Collects the published output of a loop."""

    def __init__(self):
        self.outputs: list[StepOutput] = []

    def __call__(self, output):
        self.outputs.append(output)

    def tokens(self, session_id):
        return [t for o in self.outputs for c in o.commits if c.session_id == session_id for t in c.tokens.tolist()]


def running_loop(engine, **options):
    sink, faults = Sink(), []
    loop = EngineLoop(faults.append, **options)
    loop.start(engine, sink)
    return loop, sink, faults


def test_sessions_run_to_their_end_beside_an_invalid_open():
    loop, sink, faults = running_loop(CountingEngine())
    loop.submit(Message(opens=[request(1), request(2, prompt=(666,)), request(3, prompt=(9,), max_tokens=2)]))
    wait_until(lambda: len(sink.tokens(1)) == 3)
    loop.stop()
    assert (sink.tokens(1), sink.tokens(3)) == ([3, 4, 5], [10, 11])
    failures = [f for o in sink.outputs for f in o.failures]
    assert [(f.session_id, type(f.error)) for f in failures] == [(2, InvalidRequest)]
    assert faults == []


def test_a_bug_in_one_open_does_not_affect_other_sessions(caplog):
    loop, sink, faults = running_loop(CountingEngine())
    loop.submit(Message(opens=[request(1), request(2, prompt=(667,))]))
    wait_until(lambda: len(sink.tokens(1)) == 3)
    loop.stop()
    failures = [failure for output in sink.outputs for failure in output.failures]
    assert [(failure.session_id, type(failure.error)) for failure in failures] == [(2, EngineFault)]
    assert "session 2 cannot be opened" in caplog.text
    assert faults == []


def test_the_heart_tells_an_engine_that_hangs_from_one_that_rests():
    go = threading.Event()

    class Stuck(CountingEngine):
        def step(self):
            assert go.wait(20)
            return super().step()

    loop, sink, _ = running_loop(Stuck())
    assert loop.late(0.0) is None, "an idle engine waits for messages"
    loop.submit(Message(opens=[request(1)]))
    wait_until(lambda: loop.late(0.02) is not None)
    assert loop.late(60.0) is None
    go.set()
    wait_until(lambda: len(sink.tokens(1)) == 3)
    wait_until(lambda: loop.late(0.0) is None)
    go.clear()
    work = loop.call(lambda: go.wait(20))  # such as new weights
    time.sleep(0.05)
    assert loop.late(0.04) is None
    wait_until(lambda: loop.late(0.004) is not None)
    go.set()
    work.result(10)
    loop.stop()


async def test_an_engine_that_hangs_is_reported_and_its_process_ends(caplog):
    go, ended = threading.Event(), asyncio.Event()

    class Stuck(CountingEngine):
        def step(self):
            assert go.wait(20)
            return super().step()

    loop, _, _ = running_loop(Stuck())
    server = GrpcServer()
    served = []
    server.set_status = lambda name, serving: asyncio.sleep(0, served.append(serving))
    watching = asyncio.create_task(watch_engine(loop, server, 0.2, ended.set))
    await asyncio.sleep(0.3)
    assert served == []
    loop.submit(Message(opens=[request(1)]))
    await asyncio.wait_for(ended.wait(), 20)
    assert served == [False]
    assert server.health.progress.startswith("hangs: the engine has not finished a step")
    assert "not serving" in caplog.text
    go.set()
    wait_until(lambda: loop.late(0.0) is None)
    while served != [False, True]:  # an end that comes in time
        await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.to_thread(loop.stop)


@pytest.mark.parametrize("last", [666, 667])
def test_a_session_ends_if_the_open_that_replaces_it_is_refused(last):
    engine = CountingEngine()
    loop, sink, _ = running_loop(engine)
    loop.submit(Message(opens=[request(1, max_tokens=10**9), request(1, prompt=(last,)), request(2)]))
    wait_until(lambda: len(sink.tokens(2)) == 3)
    loop.stop()
    assert (engine.closed, sink.tokens(1)) == ([1], [])


def test_commits_of_a_frame_are_received_before_its_closes():
    """Online learning reads these commits."""
    received = []

    class Listening(CountingEngine):
        def close(self, session_id):
            received.append(session_id)

        def receive(self, proposals, commits):
            received.append([commit.session_id for commit in commits])

    loop, _, faults = running_loop(Listening())
    commits = [Commit(session_id, 2, np.array([3], np.uint32), 0) for session_id in (1, 2, 1)]
    loop.submit(Message(commits=commits, closes=[4, 1]))
    loop.call(lambda: None).result(10)
    loop.stop()
    assert received == [[1, 1], 4, 1, [1, 2, 1]]
    assert faults == []


class Audited(CountingEngine):
    """Counts the audits of its pages."""

    audits = 0

    def check(self):
        assert not self.sessions
        self.audits += 1


@pytest.mark.parametrize("end", ["finished", "closed"])
def test_pages_are_audited_whenever_the_engine_becomes_idle(end):
    engine = Audited()
    loop, sink, faults = running_loop(engine, audit_seconds=0.02)
    for count in (1, 2, 3):  # idle at the start, and after every session
        wait_until(lambda count=count: engine.audits == count)
        if count < 3:
            loop.submit(Message(opens=[request(count, max_tokens=3 if end == "finished" else 10**9)]))
            wait_until(lambda count=count: sink.tokens(count))
            if end == "closed":
                loop.submit(Message(closes=[count]))
    loop.stop()
    assert faults == []


def test_there_is_no_audit_between_two_messages():
    """A draft service is idle after every proposal; an audit would take longer than its step."""
    engine = Audited()
    loop, sink, faults = running_loop(engine, audit_seconds=60.0)
    for session in (1, 2, 3):
        loop.submit(Message(opens=[request(session, max_tokens=3)]))
        wait_until(lambda session=session: len(sink.tokens(session)) == 3)
    assert loop.call(lambda: engine.audits).result(10) == 0
    loop.stop()
    assert faults == []


def test_an_idle_engine_publishes_its_load():
    engine = Audited()
    loop, sink, faults = running_loop(engine, audit_seconds=0.02)
    loop.submit(Message(opens=[request(1, max_tokens=10**9)]))
    wait_until(lambda: sink.tokens(1))
    loop.submit(Message(closes=[1]))
    wait_until(lambda: not sink.outputs[-1].has_output)
    before, last = sink.outputs[-2].load, sink.outputs[-1].load
    assert (before.running_sessions, last.running_sessions) == (1, 0)
    assert last.step_microseconds == before.step_microseconds
    loop.stop()
    assert faults == []


class Gathering(CountingEngine):
    """Only the first and last output of a session is urgent."""

    coalesce_seconds = 60.0
    version = ""

    def step(self):
        output = super().step()
        output.urgent = any(c.base_length == 2 or c.finish_reason != FinishReason.RUNNING for c in output.commits)
        return output

    def load(self):
        return replace(super().load(), weight_version=self.version)


def sizes(sink):
    return [len(output.commits) for output in sink.outputs if output.commits]


def test_output_that_is_not_urgent_is_published_with_urgent_output():
    loop, sink, faults = running_loop(Gathering())
    loop.submit(Message(opens=[request(1, max_tokens=9)]))
    wait_until(lambda: len(sink.tokens(1)) == 9)
    loop.stop()
    assert sink.tokens(1) == list(range(3, 12))
    assert sizes(sink) == [1, 8]
    assert faults == []


def test_output_that_is_not_urgent_is_published_after_the_coalescing_window(monkeypatch):
    monkeypatch.setattr(Gathering, "coalesce_seconds", 0.0)
    loop, sink, faults = running_loop(Gathering())
    loop.submit(Message(opens=[request(1, max_tokens=9)]))
    wait_until(lambda: len(sink.tokens(1)) == 9)
    loop.stop()
    assert sizes(sink) == [1] * 9
    assert faults == []


def test_an_idle_engine_has_published_all_output():
    engine = Gathering()
    loop, sink, faults = running_loop(engine)
    loop.submit(Message(opens=[request(1, max_tokens=10**9)]))
    wait_until(lambda: engine.steps > 5)
    loop.submit(Message(closes=[1]))
    wait_until(lambda: engine.closed and len(sink.tokens(1)) == engine.steps)
    loop.stop()
    assert sink.tokens(1) == list(range(3, 3 + engine.steps))
    assert faults == []


def test_steps_of_different_weights_are_not_coalesced():
    engine = Gathering()
    loop, sink, faults = running_loop(engine)
    loop.submit(Message(opens=[request(1, max_tokens=10**9)]))
    wait_until(lambda: engine.steps > 5)
    before = loop.call(lambda: setattr(engine, "version", "new") or engine.steps).result(10)
    wait_until(lambda: engine.steps > before + 5)
    loop.submit(Message(closes=[1]))
    wait_until(lambda: engine.closed and len(sink.tokens(1)) == engine.steps)
    loop.stop()
    reported = [(output.load.weight_version, len(output.commits)) for output in sink.outputs if output.commits]
    assert reported == [("", 1), ("", before - 1), ("new", engine.steps - before)]
    assert faults == []


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_an_engine_that_breaks_is_reported_once():
    engine = CountingEngine()
    engine.broken = True
    loop, _, faults = running_loop(engine)
    loop.submit(Message(opens=[request()]))
    wait_until(lambda: faults)
    assert [str(f) for f in faults] == ["the device is on fire"]
    assert loop.fault is faults[0]


def test_work_is_done_in_the_engine_thread_between_steps():
    loop, sink, faults = running_loop(CountingEngine())
    loop.submit(Message(opens=[request(1, max_tokens=10**9)]))
    wait_until(lambda: sink.tokens(1))
    assert loop.call(lambda: threading.current_thread().name).result(10) == "engine"

    def refuse():
        raise InvalidRequest("not like that")

    with pytest.raises(InvalidRequest, match="not like that"):
        loop.call(refuse).result(10)
    count = len(sink.tokens(1))
    wait_until(lambda: len(sink.tokens(1)) > count)  # it goes on
    loop.stop()
    assert faults == []
    with pytest.raises(Unavailable):
        loop.call(lambda: None).result(10)


def test_work_that_breaks_the_engine_ends_it_and_fails_later_work():
    loop, _, faults = running_loop(CountingEngine())
    release = threading.Event()

    def hold():
        release.wait(10)
        raise EngineFault("half of it is done")

    broken, behind = loop.call(hold), loop.call(lambda: None)
    release.set()
    with pytest.raises(EngineFault):
        broken.result(10)
    with pytest.raises(Unavailable):
        behind.result(10)
    assert [str(fault) for fault in faults] == ["half of it is done"]


def test_objects_from_before_the_start_are_not_collected():
    gc.unfreeze()  # Python 3.12 begins with some
    assert gc.get_freeze_count() == 0
    with frozen_heap():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


LOADING = """
import sys, time
from outrider.config import TargetConfig
from outrider.process import process
from outrider.transport.rpc import serve_engine

def build():
    print("loading", flush=True)
    time.sleep(3600)

async def serve(config):
    return await serve_engine(build, config.listen, None, None, lambda *_: [])

sys.exit(process.run("target", TargetConfig(listen=sys.argv[1]), serve))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_that_still_loads(tmp_path, number):
    path = tmp_path / "service.sock"
    command = [sys.executable, "-c", LOADING, f"unix:{path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []
