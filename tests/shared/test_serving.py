"""Engine loop, streams and scheduler, around engines and pools that can be worked out by hand."""

import asyncio
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import EngineFault, InvalidRequest
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.loop import EngineLoop
from outrider.serving.messages import Message, OpenSession, StepOutput
from outrider.serving.scheduler import Limits, Scheduler
from outrider.serving.session import Session
from outrider.serving.stream import StreamHub
from outrider.speculation.proposal import FinishReason, Proposal
from outrider.speculation.sampling import SamplingParams, StopConditions
from tests.shared.counting import CountingEngine


def request(session_id=1, prompt=(1, 2), max_tokens=3, committed=()):
    tokens = np.array([*prompt, *committed], np.uint32)
    return OpenSession(session_id, tokens, len(prompt), SamplingParams(), StopConditions(max_tokens))


# --- loop ---


class Sink:
    """Collects what a loop publishes, and waits for it."""

    def __init__(self):
        self.outputs: list[StepOutput] = []
        self.event = threading.Event()
        self.until = lambda: True

    def __call__(self, output):
        self.outputs.append(output)
        if self.until():
            self.event.set()

    def wait_for(self, condition):
        self.until = condition
        if not condition():
            assert self.event.wait(10)

    def tokens(self, session_id):
        return [t for o in self.outputs for c in o.commits if c.session_id == session_id for t in c.tokens.tolist()]


def running_loop(engine):
    sink, faults = Sink(), []
    loop = EngineLoop(faults.append)
    loop.start(engine, sink)
    return loop, sink, faults


def test_sessions_run_to_their_end_and_bad_opens_harm_nobody():
    loop, sink, faults = running_loop(CountingEngine())
    loop.submit(Message(opens=[request(1), request(2, prompt=(666,)), request(3, prompt=(9,), max_tokens=2)]))
    sink.wait_for(lambda: len(sink.tokens(1)) == 3)
    loop.stop()
    assert (sink.tokens(1), sink.tokens(3)) == ([3, 4, 5], [10, 11])
    failures = [f for o in sink.outputs for f in o.failures]
    assert [(f.session_id, type(f.error)) for f in failures] == [(2, InvalidRequest)]
    assert faults == []


@pytest.mark.parametrize("end", ["finished", "closed"])
def test_pages_are_audited_whenever_the_engine_becomes_idle(end):
    class Audited(CountingEngine):
        audits = 0

        def check(self):
            assert not self.sessions
            self.audits += 1

    engine = Audited()
    loop, sink, faults = running_loop(engine)
    for count in (1, 2, 3):  # idle at the start, and after every session
        wait_until(lambda count=count: engine.audits == count)
        if count < 3:
            loop.submit(Message(opens=[request(count, max_tokens=3 if end == "finished" else 10**9)]))
            sink.wait_for(lambda count=count: sink.tokens(count))
            if end == "closed":
                loop.submit(Message(closes=[count]))
    loop.stop()
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
    loop._thread.join(10)
    assert [str(f) for f in faults] == ["the device is on fire"]
    assert loop.fault is faults[0]


# --- streams ---


async def frames(queue):
    while (frame := await queue.get()) is not None:
        if isinstance(frame, Exception):
            raise frame
        yield frame


@pytest.fixture
async def hub():
    engine = CountingEngine()
    loop = EngineLoop(lambda _: None)
    hub = StreamHub(loop.submit, lambda frame: (frame, []), lambda output: output)
    loop.start(engine, hub.publish)
    yield hub, engine
    await asyncio.to_thread(loop.stop)


async def collect(stream, outputs):
    async for output in stream:
        outputs.append(output)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def finished(outputs):
    return [c.session_id for o in outputs for c in o.commits if c.finish_reason != FinishReason.RUNNING]


async def test_each_stream_hears_of_its_own_sessions(hub):
    hub, _ = hub
    queues, heard = [asyncio.Queue(), asyncio.Queue()], [[], []]
    tasks = [asyncio.create_task(collect(hub.serve(frames(q)), out)) for q, out in zip(queues, heard, strict=True)]
    queues[0].put_nowait(Message(opens=[request(1), request(2)]))
    queues[1].put_nowait(Message(opens=[request(3), request(4, prompt=(666,))]))
    await until(lambda: len(finished(heard[0])) == 2 and finished(heard[1]))
    assert sorted(finished(heard[0])) == [1, 2]
    assert finished(heard[1]) == [3]
    assert [f.session_id for o in heard[1] for f in o.failures] == [4]
    assert not [f for o in heard[0] for f in o.failures]
    for queue in queues:
        queue.put_nowait(None)
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("end", ["half-close", "error", "cancel"])
async def test_a_stream_that_ends_takes_its_sessions_along(hub, end):
    hub, engine = hub
    queue, heard = asyncio.Queue(), []
    task = asyncio.create_task(collect(hub.serve(frames(queue)), heard))
    queue.put_nowait(Message(opens=[request(1, max_tokens=10**9), request(2, max_tokens=10**9)]))
    await until(lambda: heard)
    if end == "cancel":
        task.cancel()
    else:
        queue.put_nowait(None if end == "half-close" else InvalidRequest("torn frame"))
    result = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result[0], {"half-close": type(None), "error": InvalidRequest}.get(end, asyncio.CancelledError))
    await until(lambda: sorted(engine.closed) == [1, 2])


# --- scheduler ---


def scheduler(pages=8, page_size=4, max_running=4, step=16, **limits):
    return Scheduler(PrefixCache(PageAllocator(pages, page_size)), Limits(max_running, step, **limits))


def session(s, session_id, length):
    """A session whose tokens are no other's."""
    prompt = range(1000 * session_id + 1, 1000 * session_id + length + 1)
    return Session(request(session_id, prompt=prompt, max_tokens=100), s.prefix)


def advance(s, chunks):
    """What an engine does with a plan: compute, and commit one token where the chunk was the last."""
    for chunk in chunks:
        chunk.session.computed = chunk.stop
        if chunk.last:
            chunk.session.append(np.array([7]))


def test_prompts_are_computed_in_chunks_and_decoding_comes_first():
    s = scheduler(pages=100, step=10)
    s.add(session(s, 1, 12))
    plan = s.plan()
    assert [(c.session.id, c.start, c.stop, c.last) for c in plan] == [(1, 0, 10, False)]
    advance(s, plan)
    s.add(session(s, 2, 20))
    plan = s.plan()
    assert [(c.session.id, c.start, c.stop, c.last) for c in plan] == [(1, 10, 12, True), (2, 0, 8, False)]
    advance(s, plan)
    plan = s.plan()
    assert [(c.session.id, c.start, c.stop, c.last) for c in plan] == [(1, 12, 13, True), (2, 8, 17, False)]


def test_places_are_limited_and_waiting_is_first_come_first_served():
    s = scheduler(pages=100, max_running=2)
    for i in range(4):
        s.add(session(s, i, 2))
    assert [c.session.id for c in s.plan()] == [0, 1]
    assert (s.running, s.waiting) == (2, 2)
    s.remove(next(iter(s)))
    assert [c.session.id for c in s.plan()] == [1, 2]


def test_the_last_arrival_gives_way_when_pages_run_out():
    s = scheduler(pages=4, page_size=4)
    first, second = session(s, 1, 7), session(s, 2, 7)
    s.add(first)
    s.add(second)
    for _ in range(2):
        advance(s, s.plan())
    assert s.running == 2
    advance(s, s.plan())  # both want a third page of four
    assert (s.running, s.preemptions) == (1, 1)
    assert second.computed == 0
    assert second.length == 9
    s.check()
    s.remove(first)
    advance(s, s.plan())
    assert second.length == 10


def test_a_session_larger_than_the_pool_is_a_fault():
    s = scheduler(pages=2, page_size=4)
    s.add(session(s, 1, 9))
    with pytest.raises(EngineFault, match="whole page pool"):
        s.plan()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(6, 12), st.integers(1, 8))
def test_every_session_ends_whatever_the_pool(lengths, pages, step):
    s = scheduler(pages=pages, page_size=4, max_running=3, step=step)
    sessions = [session(s, i, n) for i, n in enumerate(lengths)]
    for one in sessions:
        s.add(one)
    for _ in range(3000):
        if not len(s):
            break
        advance(s, s.plan())
        s.check()
        for one in list(s):
            if one.new_tokens >= 3:
                s.remove(one)
    assert len(s) == 0
    assert all(one.new_tokens == 3 for one in sessions)


def test_proposals_make_the_counting_engine_faster():
    engine = CountingEngine()
    engine.open(request(1, prompt=(1,), max_tokens=4))
    engine.receive([Proposal(1, 1, 0, np.array([2, 3, 9], np.uint32), np.arange(-1, 2), np.zeros(3))], [])
    commit = engine.step().commits[0]
    assert (commit.tokens.tolist(), commit.verified, commit.accepted) == ([2, 3, 4], 3, 2)
