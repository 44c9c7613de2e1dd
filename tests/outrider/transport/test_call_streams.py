"""Streams over gRPC that the engine thread writes: frames leave at once, and a slow reader blocks nothing."""

import asyncio
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from outrider.serving.inbox import Inbox
from outrider.serving.messages import EngineLoad, Message, StepOutput
from outrider.speculation.proposal import Commit, FinishReason
from outrider.transport.call_streams import CallStream, CallStreams, CallWriter
from outrider.transport.outbox import Routes
from tests.support.outrider.counting import request, until


class Slow:
    """A call whose writes end when the test lets them. As with grpc.aio, their futures belong to the network thread's
    loop, whichever thread writes. written: frames, and the threads that wrote them
    """

    def __init__(self):
        self.written, self.waiting, self.error = [], [], None
        self.loop = asyncio.get_running_loop()

    async def write(self, frame):
        if self.error is not None:
            raise self.error
        self.written.append((frame, threading.current_thread()))
        self.waiting.append(self.loop.create_future())
        await self.waiting[-1]

    def finish(self):
        self.waiting.pop(0).set_result(None)


class Engine:
    """Runs calls at once, as the engine thread does between two steps."""

    def __init__(self):
        self.messages = []
        self.submit = self.messages.append
        self.inbox = SimpleNamespace(put_first=self.submit)

    def call(self, work):
        work()


def commit(session_id):
    output = StepOutput(load=EngineLoad())
    output.commits.append(Commit(session_id, 1, [5], 0, 0, 0, FinishReason.RUNNING))
    return output


class OneStream:
    """A stream with two sessions. ended: the errors with which it ended"""

    def __init__(self, context, encode=lambda output: [c.session_id for c in output.commits]):
        self.engine, self.routes, self.ended = Engine(), Routes(), []
        self.streams = CallStreams(self.engine, encode, self.routes)
        self.stream = CallStream(CallWriter(context), self.ended.append)
        self.streams.begin(self.stream)
        self.engine.submit(self.streams.admit(self.stream, [], Message(opens=[request(1), request(2)])))

    def publish(self, output):
        self.routes.route(output)
        self.streams.write_all()


async def test_the_thread_that_publishes_writes_the_frame():
    context = Slow()
    await asyncio.to_thread(OneStream(context).publish, commit(1))
    [(frame, thread)] = context.written
    assert frame == [1]
    assert thread is not threading.current_thread()


async def test_output_collects_while_a_frame_is_written_and_follows_it():
    context = Slow()
    one = OneStream(context)
    for session_id in (1, 2, 1):
        one.publish(commit(session_id))
    assert [frame for frame, _ in context.written] == [[1]]
    context.finish()
    await until(lambda: len(context.written) == 2)  # without further output
    assert context.written[1][0] == [2, 1]
    context.finish()
    one.publish(commit(2))  # the writer is idle again
    assert context.written[2][0] == [2]
    assert not one.stream.outbox.full


@pytest.mark.parametrize("when", ["at once", "later"])
async def test_a_failed_write_ends_its_stream_and_closes_its_sessions(when):
    context = Slow()
    one = OneStream(context)
    if when == "at once":
        context.error = RuntimeError("the call has ended")
    one.publish(commit(1))
    if when == "later":
        context.waiting.pop().set_exception(asyncio.CancelledError())
        one.publish(commit(1))
    assert one.ended == [None]
    assert [message.closes for message in one.engine.messages] == [(), [1, 2]]
    one.publish(commit(1))
    one.streams.end(one.stream)
    assert one.ended == [None]


async def test_sessions_of_a_lost_stream_are_closed_before_a_frame_that_opens_them_again():
    one = OneStream(Slow())
    inbox = one.engine.inbox = Inbox()
    inbox.put("a frame of the peer's new stream")
    one.streams.drop(one.stream.outbox)
    assert inbox.get().closes == [1, 2]
    assert inbox.get() == "a frame of the peer's new stream"
    late = Message(opens=[request(3)])
    assert one.streams.admit(one.stream, [], late) == Message()


async def test_a_frame_that_cannot_be_encoded_ends_its_stream_with_the_error():
    one = OneStream(Slow(), lambda output: output.commits[9])
    one.publish(commit(1))
    assert [type(error) for error in one.ended] == [IndexError]


async def test_a_stream_that_ends_lets_its_last_write_end():
    context = Slow()
    one = OneStream(context)
    one.publish(commit(1))
    one.streams.end(one.stream)
    context.finish()
    await until(lambda: not one.stream.writer.pending)


# The first import of grpc reads the environment, so outrider must set it before.
_FIRST = """
import importlib.abc, os, sys
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            assert "-event_engine_client,-event_engine_listener" in os.environ.get("GRPC_EXPERIMENTS", ""), "too late"
sys.meta_path.insert(0, Watch())
import {module}
import grpc
grpc.insecure_channel("unix:/nowhere")
"""


@pytest.mark.parametrize("module", ["outrider.transport.rpc", "gateway.process.app", "services.draft.process.service"])
def test_grpc_starts_without_the_thread_pool_of_its_event_engine(module):
    code = _FIRST.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Unknown experiment" not in done.stderr
