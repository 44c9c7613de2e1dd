"""The life of a link: connecting, losing its stream, stopping."""

import asyncio
import contextlib
import signal
import subprocess
import sys

import grpc
import numpy as np
import pytest

from gateway.streams import connection
from gateway.streams import link as links
from gateway.streams.availability import ReplicaState
from gateway.streams.connection import Connection
from gateway.streams.replica import attempts
from gateway.streams.target import TargetLink
from outrider.errors import ConfigError, Unavailable
from outrider.serving.messages import OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.transport.frame_socket import SocketCall
from outrider.transport.rpc import GrpcServer
from outrider.transport.statuses import statuses
from outrider.wire.opens import open_to_pb
from outrider.wire.v1 import common_pb2, target_pb2
from tests.support.gateway.services import Draft, Service, Target, free_port, model_info


class Call:
    """A stream with the frames that a test puts in, until it ends."""

    def __init__(self):
        self.end, self.frames = asyncio.Event(), asyncio.Queue()

    async def read(self):
        waits = [asyncio.create_task(self.end.wait()), asyncio.create_task(self.frames.get())]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return waits[1].result() if waits[1] in done else grpc.aio.EOF

    def cancel(self):
        self.end.set()


class Near(TargetLink):
    """A link whose service answers at once."""

    def __init__(self):
        super().__init__("unix:/nowhere")
        self.calls = []
        self.stream.open_stream = self.open_stream

    @contextlib.asynccontextmanager
    async def open_channel(self):
        yield None

    async def handshake(self, channel):
        return None

    def open_stream(self, channel, metadata):
        self.calls.append(Call())
        return self.calls[-1]


@pytest.fixture(autouse=True)
def serving(monkeypatch):
    async def check(channel, seconds):
        pass

    monkeypatch.setattr(links, "check_serving", check)


@pytest.mark.parametrize("turns", range(8))
async def test_a_link_stops_while_its_stream_is_being_lost(turns):
    link = Near()
    link.start()
    await link.wait_up(60)
    (call,) = link.calls
    call.end.set()
    for _ in range(turns):  # of the event loop: the loss is detected, the writer ends, the link waits
        await asyncio.sleep(0)
    await asyncio.wait_for(link.stop(), 60)
    assert not link.up
    assert len(link.calls) == 1


async def test_concurrent_reconnects_open_one_stream():
    link = Near()
    link.start()
    await link.wait_up(60)
    for _ in range(2):
        link.reconnect()
    for _ in range(30):  # of the event loop, until all tasks wait
        await asyncio.sleep(0)
    assert [call.end.is_set() for call in link.calls] == [True, False]
    await link.stop()


async def test_a_lost_stream_reconnects(monkeypatch):
    monkeypatch.setattr(attempts, "_MIN_WAIT", 0.01)
    link = Near()
    link.start()
    await link.wait_up(60)
    link.update_load(common_pb2.EngineLoad(running_sessions=4))
    link.calls[0].end.set()
    async with asyncio.timeout(60):
        while len(link.calls) < 2 or not link.up:
            await asyncio.sleep(0.01)
    assert link.load.report is None  # its sessions ended with the stream
    await link.stop()


async def test_a_replica_that_does_not_answer_is_asked_ever_more_rarely(monkeypatch):
    waits, sleep = [], asyncio.sleep

    async def no_sleep(seconds):
        waits.append(seconds)
        await sleep(0)

    class Silent(Near):
        async def handshake(self, channel):
            if len(waits) < 5:
                raise ConnectionError("nothing answers")

    monkeypatch.setattr(attempts.asyncio, "sleep", no_sleep)
    link = Silent()
    link.start()
    await link.wait_up(60)
    await link.stop()
    assert max(waits[:2]) < 0.8 < max(waits)


class Starting(Target):
    """A target that serves later, and offers its tokenizer's files earlier."""

    def __init__(self):
        super().__init__(None, model_info())
        self.loaded = False

    async def GetTargetInfo(self, request, context):
        async with statuses(context):
            if not self.loaded:
                raise Unavailable("the target is loading its model", retry_after=1)
            return await super().GetTargetInfo(request, context)

    async def Verify(self, request_iterator, context):
        await asyncio.Event().wait()


async def test_a_replica_that_starts_up_is_used_as_soon_as_it_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "_MIN_WAIT", 60.0)  # between attempts
    monkeypatch.setattr(attempts, "_STARTING_WAIT", 60.0)
    target, server, address = Starting(), GrpcServer(), f"unix:{tmp_path}/target"
    target.register(server.server)
    await server.start(address, (target.name,))
    link = TargetLink(address)
    offered = asyncio.get_running_loop().create_future()
    link.tokenizer.on_early = offered.set_result
    link.start()
    try:
        async with asyncio.timeout(60):
            assert await offered == target.files
            assert (link.up, link.availability.state) != (True, ReplicaState.READY)
            await asyncio.sleep(0.2)  # it watches the health by now
            target.loaded = True
            await server.set_serving(True)
            await link.wait_up(60)
        assert link.tokenizer.files == target.files
    finally:
        await link.stop()
        await server.stop(0)


@pytest.mark.parametrize("one_machine", [True, False])
@pytest.mark.parametrize("transport", ["grpc", "auto"])
async def test_frames_bypass_grpc_on_one_machine_if_allowed(tmp_path, one_machine, transport):
    address = f"unix:{tmp_path}/target" if one_machine else f"127.0.0.1:{free_port()}"
    service = await asyncio.to_thread(Service(Target, address).start)
    link = TargetLink(address, Connection(transport=transport))
    async with link.open_channel() as channel:
        call = await link.stream.start_call(channel)
        bypasses = one_machine and transport == "auto"
        assert isinstance(call, SocketCall) is bypasses
        assert link.stream.transport == ("socket" if bypasses else "grpc")
        await call.write(target_pb2.VerifyRequest(closes=b"123").SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError, match="3 bytes"):
            await call.read()
    await asyncio.to_thread(service.stop)


async def test_frames_that_must_use_a_socket_need_one(tmp_path):
    for address, reason in (
        (f"127.0.0.1:{free_port()}", "its address is no Unix domain socket"),
        (f"unix:{tmp_path}/target", "no process listens at .*target.frames"),
    ):
        with pytest.raises(ConfigError, match=f"--stream-transport socket: .*{reason}; choose grpc or auto"):
            await TargetLink(address, Connection(transport="socket")).stream.start_call(None)


@pytest.mark.parametrize("transport", ["grpc", "socket"])
async def test_frames_and_their_bytes_are_counted(tmp_path, transport):
    address = f"unix:{tmp_path}/target"
    service = await asyncio.to_thread(Service(Target, address).start)
    link, frames = TargetLink(address, Connection(transport=transport)), []
    link.stream.on_frame = _collector(frames)
    link.start()
    await link.wait_up(15)
    request = open_to_pb(OpenSession(1, np.arange(3, 9, dtype=np.uint32), 6, SamplingParams(0.0), StopConditions(4)))
    link.open(request)
    async with asyncio.timeout(15):
        while not any(frame.commits.session_ids for frame in frames):
            await asyncio.sleep(0.01)
    await link.stop()
    await asyncio.to_thread(service.stop)
    counts = link.stream.traffic.counts
    assert {lane.transport for lane in counts} == {transport}
    sent, received = counts["target", "sent", transport], counts["target", "received", transport]
    assert (sent.frames, sent.bytes) == (1, target_pb2.VerifyRequest(opens=[request]).ByteSize())
    assert (received.frames, received.bytes) == (len(frames), sum(frame.ByteSize() for frame in frames))
    assert counts["features", "received", transport].frames == 0


async def test_hidden_states_are_counted_on_their_own():
    link = Near()
    link.start()
    await link.wait_up(60)
    rows = bytes(96)
    link.calls[0].frames.put_nowait(
        target_pb2.VerifyResponse(features=common_pb2.FeatureBatch(rows=rows)).SerializeToString()
    )
    async with asyncio.timeout(60):
        while not (count := link.stream.traffic.count("features", "received", "grpc")).frames:
            await asyncio.sleep(0.01)
    assert count.bytes == len(rows)
    await link.stop()


def _collector(frames):
    async def collect(frame):
        frames.append(frame)

    return collect


_SERVICE = """
import sys, threading
from tests.support.gateway.services import Service, Target
Service(Target, sys.argv[1]).start()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("one_machine", [True, False])
async def test_a_stopped_service_is_detected(tmp_path, monkeypatch, one_machine):
    """With a tenth of the keep-alive times."""
    assert dict(connection.CHANNEL_OPTIONS)["grpc.http2.ping_timeout_ms"] == 10_000
    shorter = {"grpc.keepalive_time_ms": 2000, "grpc.keepalive_timeout_ms": 1000, "grpc.http2.ping_timeout_ms": 1000}
    options = [(name, shorter.get(name, value)) for name, value in connection.CHANNEL_OPTIONS]
    monkeypatch.setattr(connection, "CHANNEL_OPTIONS", options)
    address = f"unix:{tmp_path}/target" if one_machine else f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _SERVICE, address, stdout=subprocess.PIPE)
    try:
        await process.stdout.readline()
        link, lost = TargetLink(address), asyncio.Event()
        link.events.down = lost.set
        link.start()
        await link.wait_up(20)
        process.send_signal(signal.SIGSTOP)
        await asyncio.wait_for(lost.wait(), 20)
        assert not link.up
        await link.stop()
    finally:
        process.kill()
        await process.wait()


# --- the token of the services ---

TOKEN = "a-token-of-the-tests"


@pytest.mark.parametrize(
    ("token", "words"),
    [(TOKEN, None), (None, "the caller has no service token"), (TOKEN + "x", "the caller has another service token")],
)
async def test_a_service_accepts_only_gateways_with_its_token(tmp_path, token, words):
    target = Service(Target, f"unix:{tmp_path}/target.sock", token=TOKEN).start()
    link = TargetLink(target.address, Connection(token=token))
    link.start()
    try:
        if words is None:
            await link.wait_up(20)
        else:
            with pytest.raises(ConfigError, match=f"the target at unix:.* refuses this gateway: {words}"):
                await link.wait_up(20)
            assert link.availability.state is ReplicaState.REFUSED
    finally:
        await link.stop()
        await asyncio.to_thread(target.stop)


async def test_a_link_follows_the_health_of_its_replica(tmp_path):
    """A replica that stops, or whose engine hangs, does not serve although its stream is open."""
    service = Service(Target, f"unix:{tmp_path}/target").start()
    link, changes = TargetLink(service.address), []
    changed = asyncio.Event()
    link.events.stopping = lambda: (changes.append(link.stopping), changed.set())
    link.start()
    try:
        await link.wait_up(10)
        for serving in (False, True):
            changed.clear()
            asyncio.run_coroutine_threadsafe(service.server.set_serving(serving), service._loop)
            await asyncio.wait_for(changed.wait(), 60)
            assert link.open_to_sessions is serving
        assert changes == [True, False]
        link._lost()
        assert not link.stopping
    finally:
        await link.stop()
        await asyncio.to_thread(service.stop)


async def test_a_service_of_another_kind_is_refused(tmp_path):
    draft = Service(Draft, f"unix:{tmp_path}/draft.sock").start()
    link = TargetLink(draft.address)
    link.start()
    try:
        with pytest.raises(ConfigError, match=r"the service at unix:.* is no target of this release"):
            await link.wait_up(20)
        assert link.availability.state is ReplicaState.REFUSED
    finally:
        await link.stop()
        await asyncio.to_thread(draft.stop)
