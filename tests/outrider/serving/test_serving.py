"""Engine loop and streams, around an engine whose tokens can be computed by hand."""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import grpc
import numpy as np
import pytest

from outrider.errors import EngineFault, InvalidRequest, Unavailable
from outrider.process.garbage_collection import frozen_heap
from outrider.serving.features import BACKLOG_BYTES, FRAME_BYTES, FeatureBlock
from outrider.serving.loop import EngineLoop
from outrider.serving.messages import EngineLoad, Message, SessionFailure, StepOutput
from outrider.speculation.proposal import Commit, FinishReason, Logprobs, Proposal
from outrider.transport.frame_socket import MAX_MESSAGE_BYTES
from outrider.transport.hang_watch import watch_engine
from outrider.transport.outbox import Outbox, Routes
from outrider.transport.rpc import GrpcServer
from outrider.transport.stream import StreamHub
from outrider.wire.codec import verify_response_to_pb
from tests.support.outrider.counting import CountingEngine, request, until

# --- loop ---


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


# --- streams ---


def block(session_id, first, rows, size=1000):
    return FeatureBlock(session_id, first, np.zeros((rows, size), np.uint8))


def test_features_are_sent_after_commits_in_frames_of_bounded_size():
    calls, published = [], []
    routes, outbox = Routes(), Outbox(lambda: calls.append(1))
    routes.enter(outbox)
    routes.admit(Message(opens=[request(1), request(2)]), outbox)
    commit = Commit(2, 3, np.array([7], np.uint32), 5)
    routes.route(StepOutput(features=[block(1, 0, 6000), block(9, 0, 5)], load=EngineLoad(weight_version="a")))
    routes.route(StepOutput(commits=[commit], features=[block(2, 2, 1)], load=EngineLoad(weight_version="a")))
    routes.route(StepOutput(commits=[commit], load=EngineLoad(weight_version="b")))
    assert len(calls) == 3
    while outbox.full:
        published.append(outbox.take())
    # A frame has the commits of one version of the weights; features follow the last of them.
    assert [(len(f.commits), f.load.weight_version) for f in published] == [(1, "a"), (1, "b"), (0, "b")]
    assert [sum(b.rows.nbytes for b in f.features) <= FRAME_BYTES for f in published] == [True] * 3
    rows = [(b.session_id, b.first, len(b.rows)) for f in published for b in f.features]
    assert rows == [(1, 0, 4194), (1, 4194, 1806), (2, 2, 1)]


def test_log_probabilities_are_sent_in_frames_of_bounded_size():
    """Output collects while a peer reads slowly, and too long a frame would end the stream."""

    def commit(session_id, reported):
        top = np.zeros((reported, 20), np.uint32), np.zeros((reported, 20), np.float32)
        prompt = Logprobs(1, np.zeros(reported, np.float32), *top) if reported else None
        return Commit(session_id, 5, np.array([7], np.uint32), 5, prompt_logprobs=prompt)

    outbox, frames = Outbox(lambda: None), []
    for first in range(0, 12, 3):
        outbox.add(StepOutput([commit(first, 40_000), commit(first + 1, 0), commit(first + 2, 60_000)]))
    outbox.add(StepOutput([commit(12, 300_000)], features=[block(1, 0, 1)]))
    outbox.fail([failed := SessionFailure(13, Unavailable("gone"))])
    while outbox.full:
        frames.append(outbox.take())
    assert [commit.session_id for frame in frames for commit in frame.commits] == list(range(13))
    sizes = [verify_response_to_pb(frame).ByteSize() for frame in frames]
    assert max(sizes) < MAX_MESSAGE_BYTES
    assert sum(size > 17 << 20 for size in sizes) == 1, "the one that is so long by itself"
    assert [bool(frame.features) for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert [failure for frame in frames for failure in frame.failures] == [failed]
    assert frames[-1].failures == [failed]


def test_a_prompt_with_too_many_log_probabilities_for_a_frame_is_refused():
    many = replace(request(prompt=range(400_000)), prompt_logprobs=20)
    for asked in (many, replace(many, prompt_logprobs=16)):
        with pytest.raises(InvalidRequest, match=r"of 400000 prompt tokens.* at most 15") as refused:
            asked.validate(400_000, 400_001)
        assert refused.value.param == "prompt_logprobs"
    for asked in (replace(many, prompt_logprobs=15), replace(many, prompt_logprobs=None, logprobs=20)):
        asked.validate(400_000, 400_001)


def test_features_for_a_slow_reader_are_dropped():
    outbox = Outbox(lambda: None)
    big = np.zeros((1, BACKLOG_BYTES // 2), np.uint8)
    outbox.add(StepOutput(features=[FeatureBlock(1, i, big) for i in range(3)]))
    assert len(outbox.unsent_features) == 2
    frame = outbox.take()
    assert [b.first for b in frame.features] == [0]
    outbox.add(StepOutput(features=[FeatureBlock(1, 3, big)]))
    assert [b.first for b in outbox.unsent_features] == [1, 3]


class StreamCall:
    """The service's side of a stream call: reads frames from a queue, and collects what is written."""

    def __init__(self, queue, outputs):
        self.queue, self.outputs = queue, outputs

    def invocation_metadata(self):
        return ()

    async def send_initial_metadata(self, metadata):
        pass

    async def read(self):
        frame = await self.queue.get()
        if isinstance(frame, Exception):
            raise frame
        return grpc.aio.EOF if frame is None else frame

    async def write(self, output):
        self.outputs.append(output)


@pytest.fixture
async def hub(request):
    """A hub around a counting engine. param: options of the loop."""
    engine = CountingEngine()
    loop = EngineLoop(lambda _: None, **getattr(request, "param", {}))
    hub = StreamHub(loop, lambda frame: (frame, []), lambda output: output)
    loop.start(engine, hub.publish)
    yield hub, engine
    await asyncio.to_thread(loop.stop)


def finished(outputs):
    return [c.session_id for o in outputs for c in o.commits if c.finish_reason != FinishReason.RUNNING]


async def test_each_stream_receives_output_of_its_own_sessions(hub):
    hub, _ = hub
    queues, received = [asyncio.Queue(), asyncio.Queue()], [[], []]
    calls = [StreamCall(q, out) for q, out in zip(queues, received, strict=True)]
    tasks = [asyncio.create_task(hub.answer(call, None)) for call in calls]
    queues[0].put_nowait(Message(opens=[request(1), request(2)]))
    queues[1].put_nowait(Message(opens=[request(3), request(4, prompt=(666,))]))
    await until(lambda: len(finished(received[0])) == 2 and finished(received[1]))
    assert sorted(finished(received[0])) == [1, 2]
    assert finished(received[1]) == [3]
    assert [f.session_id for o in received[1] for f in o.failures] == [4]
    assert not [f for o in received[0] for f in o.failures]
    for queue in queues:
        queue.put_nowait(None)
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("hub", [{"audit_seconds": 0.02}], indirect=True)
async def test_all_streams_receive_a_load_that_changes_while_idle(hub):
    hub, _ = hub
    queues, received = [asyncio.Queue(), asyncio.Queue()], [[], []]
    calls = [StreamCall(q, out) for q, out in zip(queues, received, strict=True)]
    tasks = [asyncio.create_task(hub.answer(call, None)) for call in calls]
    queues[0].put_nowait(Message(opens=[request(1, max_tokens=10**9)]))
    await until(lambda: received[0] and received[0][-1].load.running_sessions == 1)
    queues[0].put_nowait(Message(closes=[1]))
    await until(lambda: all(outputs and outputs[-1].load.running_sessions == 0 for outputs in received))
    assert not any(output.has_output for output in received[1])
    for queue in queues:
        queue.put_nowait(None)
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("hub", [{"audit_seconds": 0.02}], indirect=True)
async def test_a_stream_whose_sessions_ended_before_those_of_others_receives_the_load_of_the_idle_engine(hub):
    hub, engine = hub
    step = engine.step

    def settled():  # as of a real engine, whose load does not count the sessions that the step has ended
        output = step()
        output.load = engine.load()
        return output

    engine.step = settled
    queues, received = [asyncio.Queue(), asyncio.Queue()], [[], []]
    calls = [StreamCall(q, out) for q, out in zip(queues, received, strict=True)]
    tasks = [asyncio.create_task(hub.answer(call, None)) for call in calls]
    queues[0].put_nowait(Message(opens=[request(1, max_tokens=10**9)]))
    await until(lambda: received[0])
    queues[1].put_nowait(Message(opens=[request(2, max_tokens=3)]))
    await until(lambda: finished(received[1]))
    assert received[1][-1].load.running_sessions == 1  # of the other stream
    queues[0].put_nowait(Message(opens=[request(1, max_tokens=3)]))
    await until(lambda: all(outputs[-1].load.running_sessions == 0 for outputs in received))
    for queue in queues:
        queue.put_nowait(None)
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("hub", [{"audit_seconds": 0.02}], indirect=True)
async def test_a_stream_that_begins_while_the_engine_is_idle_receives_its_load_once(hub):
    """Its peer may have an older load, from a stream that it has lost."""
    hub, engine = hub
    audits = []
    engine.load = lambda: EngineLoad(running_sessions=len(engine.sessions), total_pages=4)
    engine.check = lambda: audits.append(1)
    queues, received = [asyncio.Queue(), asyncio.Queue()], [[], []]
    calls = [StreamCall(q, out) for q, out in zip(queues, received, strict=True)]
    lost = asyncio.create_task(hub.answer(calls[0], None))
    queues[0].put_nowait(Message(opens=[request(1, max_tokens=10**9)]))
    await until(lambda: received[0] and received[0][-1].load.running_sessions == 1)
    audits.clear()
    queues[0].put_nowait(None)
    await lost
    await until(lambda: audits)
    assert engine.closed == [1]
    task = asyncio.create_task(hub.answer(calls[1], None))
    await until(lambda: received[1])
    audits.clear()
    queues[1].put_nowait(Message(closes=[1]))  # changes nothing, but the engine is idle anew
    await until(lambda: audits)
    queues[1].put_nowait(None)
    await task
    assert [(one.load.running_sessions, one.load.total_pages) for one in received[1]] == [(0, 4)]


@pytest.mark.parametrize("end", ["half-close", "error", "cancel"])
async def test_the_end_of_a_stream_closes_its_sessions(hub, end):
    hub, engine = hub
    queue, received = asyncio.Queue(), []
    task = asyncio.create_task(hub.answer(StreamCall(queue, received), None))
    queue.put_nowait(Message(opens=[request(1, max_tokens=10**9), request(2, max_tokens=10**9)]))
    await until(lambda: received)
    if end == "cancel":
        task.cancel()
    else:
        queue.put_nowait(None if end == "half-close" else InvalidRequest("torn frame"))
    result = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result[0], {"half-close": type(None), "error": InvalidRequest}.get(end, asyncio.CancelledError))
    await until(lambda: sorted(engine.closed) == [1, 2])


async def test_a_last_commit_ends_a_stream_s_ownership_of_the_session(hub):
    hub, engine = hub
    queue, received = asyncio.Queue(), []
    task = asyncio.create_task(hub.answer(StreamCall(queue, received), None))
    queue.put_nowait(Message(opens=[request(name, max_tokens=10**9) for name in (1, 2, 3)]))
    await until(lambda: received)
    last, other = (Commit(name, 2, np.array([3], np.uint32), 0, 0, 0, end)
                   for name, end in ((1, FinishReason.STOP), (2, FinishReason.RUNNING)))  # fmt: skip
    queue.put_nowait(Message(commits=[last, other], closes=[3]))
    queue.put_nowait(None)
    await task
    await until(lambda: 2 in engine.closed)
    assert sorted(engine.closed) == [2, 3]


def test_proposals_make_the_counting_engine_faster():
    engine = CountingEngine()
    engine.open(request(1, prompt=(1,), max_tokens=4))
    engine.receive([Proposal(1, 1, 0, np.array([2, 3, 9], np.uint32), np.arange(-1, 2), np.zeros(3))], [])
    commit = engine.step().commits[0]
    assert (commit.tokens.tolist(), commit.verified, commit.accepted) == ([2, 3, 4], 3, 2)


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
