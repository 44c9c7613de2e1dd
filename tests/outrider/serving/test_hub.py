"""Streams of an engine: frames of bounded size, and the output of each stream's own sessions."""

import asyncio
from dataclasses import replace

import grpc
import numpy as np
import pytest

from outrider.errors import InvalidRequest, Unavailable
from outrider.serving.features import BACKLOG_BYTES, FRAME_BYTES, FeatureBlock
from outrider.serving.loop import EngineLoop
from outrider.serving.messages import EngineLoad, Message, SessionFailure, StepOutput
from outrider.speculation.proposal import Commit, FinishReason, Logprobs, Proposal
from outrider.transport.frame_socket import MAX_MESSAGE_BYTES
from outrider.transport.outbox import Outbox, Routes
from outrider.transport.stream import StreamHub
from outrider.wire.codec import verify_response_to_pb
from tests.support.outrider.counting import CountingEngine, request, until


def block(session_id, first, rows, size=1000):
    return FeatureBlock(session_id, first, np.zeros((rows, size), np.uint8))


def test_features_are_sent_after_commits_in_frames_of_bounded_size():
    published = []
    routes, outbox = Routes(), Outbox()
    routes.enter(outbox)
    routes.admit(Message(opens=[request(1), request(2)]), outbox)
    commit = Commit(2, 3, np.array([7], np.uint32), 5)
    routes.route(StepOutput(features=[block(1, 0, 6000), block(9, 0, 5)], load=EngineLoad(weight_version="a")))
    routes.route(StepOutput(commits=[commit], features=[block(2, 2, 1)], load=EngineLoad(weight_version="a")))
    routes.route(StepOutput(commits=[commit], load=EngineLoad(weight_version="b")))
    assert outbox.full
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

    outbox, frames = Outbox(), []
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
    outbox = Outbox()
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
