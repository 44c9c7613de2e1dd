"""Frames over a socket beside gRPC: connection and call belong together, whichever arrives or ends first."""

import asyncio
import contextlib
import errno
import os
import socket
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from outrider.errors import ConfigError, InvalidRequest, Unavailable
from outrider.process.ports import refuse_used_socket
from outrider.serving.loop import EngineLoop
from outrider.serving.messages import Message
from outrider.speculation.proposal import FinishReason, Proposal
from outrider.supervisor.health import is_healthy
from outrider.transport import frame_socket, socket_acceptor
from outrider.transport.frame_socket import FrameSocket, SocketCall, connect_beside, socket_beside
from outrider.transport.rpc import GrpcServer
from outrider.transport.socket_acceptor import SocketAcceptor
from outrider.transport.statuses import statuses
from outrider.transport.stream import PEER_METADATA, StreamHub
from outrider.wire import codec
from outrider.wire.v1 import target_pb2, target_pb2_grpc
from tests.support.outrider.counting import CountingEngine, request, until


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/service.sock"


def exists(path):
    return os.path.exists(path)


def call_of(key):
    return SimpleNamespace(invocation_metadata=lambda: key.metadata)


async def write(connection, frame):
    connection.send(frame)
    while connection.unsent:
        await asyncio.sleep(0.001)
        connection.flush()


async def read(connection):
    """The next frame of a peer that sends one at a time; None at the end."""
    while True:
        try:
            frames = connection.receive()
        except EOFError:
            return None
        if frames:
            [frame] = frames
            return frame
        await asyncio.sleep(0.001)


async def both_ends(acceptor, address):
    key = await connect_beside(address)
    return key.connection, await acceptor.connection_of(call_of(key))


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("unix:/run/a.sock", "/run/a.sock.frames"),
        ("unix:///run/a.sock", "/run/a.sock.frames"),
        ("unix:a.sock", "a.sock.frames"),
        ("127.0.0.1:80", None),
        ("dns:///host:80", None),
    ],
)
async def test_only_unix_domain_sockets_have_one_beside_them(address, path):
    assert socket_beside(address) == path
    if path is None:
        acceptor = SocketAcceptor()
        await acceptor.open(address)
        assert await connect_beside(address) is None
        await acceptor.close()


async def test_frames_of_any_size_come_whole_and_in_order(address):
    rng = np.random.default_rng(0)
    frames = [rng.bytes(int(size)) for size in [0, 1, 4, 70_000, 5 << 20, *rng.integers(0, 3000, 40), 0]]
    acceptor = SocketAcceptor()
    await acceptor.open(address)
    ends = await both_ends(acceptor, address)

    async def write_all(end):
        for frame in frames:
            await write(end, frame)

    async def read_all(end):
        received = []
        while len(received) < len(frames):
            received += end.receive()
            await asyncio.sleep(0)
        return received

    async with asyncio.timeout(20):
        *_, here, there = await asyncio.gather(*map(write_all, ends), *map(read_all, ends))
    assert here == there == frames
    ends[0].close()
    assert await read(ends[1]) is None
    ends[1].close()
    await acceptor.close()


def test_frames_come_whole_however_the_bytes_are_cut():
    rng = np.random.default_rng(1)
    frames = [rng.bytes(int(size)) for size in rng.integers(0, 40, 50)]
    content = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
    here, there = socket.socketpair()
    connection, received = FrameSocket(there), []
    while content:
        cut = int(rng.integers(1, 30))
        here.send(content[:cut])
        content = content[cut:]
        received += connection.receive()
    assert received == frames
    assert connection.receive() == []
    here.close()
    with pytest.raises(EOFError):
        connection.receive()
    with pytest.raises(ConnectionError):
        connection.send(b"x")
    connection.close()


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_length_can_come_in_pieces(cut):
    here, there = socket.socketpair()
    connection, long = FrameSocket(there), b"\xff" * 1000
    here.send(len(long).to_bytes(4, "little"))
    assert connection.receive() == []
    here.send(long)
    assert connection.receive() == [long]
    content = b"\5\0\0\0hello"
    here.send(content[:cut])
    assert connection.receive() == []
    here.send(content[cut:])
    assert connection.receive() == [b"hello"]
    here.close()
    connection.close()


async def test_connections_find_their_calls_in_any_order(address):
    acceptor = SocketAcceptor()
    await acceptor.open(address)
    keys = [await connect_beside(address) for _ in range(3)]
    first = [asyncio.create_task(acceptor.connection_of(call_of(key))) for key in keys[::-1]]
    there = [await task for task in first][::-1]
    for i, key in enumerate(keys):
        await write(key.connection, bytes([i]))
    assert [await read(connection) for connection in there] == [b"\0", b"\1", b"\2"]
    assert not acceptor.unpaired
    for connection in [key.connection for key in keys] + there:
        connection.close()
    await acceptor.close()


async def test_a_connection_or_call_alone_waits_for_the_pairing_time(address, monkeypatch):
    monkeypatch.setattr(socket_acceptor, "PAIRING_SECONDS", 0.05)
    acceptor = SocketAcceptor()
    await acceptor.open(address)
    with pytest.raises(Unavailable):
        await acceptor.connection_of(SimpleNamespace(invocation_metadata=lambda: (("outrider-pipe", "0" * 32),)))
    key = await connect_beside(address)
    assert await read(key.connection) is None  # closed, for no call came
    key.connection.close()
    reader, writer = await asyncio.open_unix_connection(socket_beside(address))
    assert await reader.read() == b""  # closed, for no token came
    writer.close()
    assert not acceptor.unpaired
    await acceptor.close()


async def test_a_call_without_a_token_has_no_connection():
    assert await SocketAcceptor().connection_of(SimpleNamespace(invocation_metadata=lambda: None)) is None


async def test_too_long_a_frame_is_refused(address, monkeypatch):
    monkeypatch.setattr(frame_socket, "MAX_MESSAGE_BYTES", 10)
    acceptor = SocketAcceptor()
    await acceptor.open(address)
    here, there = await both_ends(acceptor, address)
    await write(here, bytes(11))
    with pytest.raises(InvalidRequest, match="11 bytes"):
        await read(there)
    here.close()
    there.close()
    await acceptor.close()


async def test_a_stale_socket_is_replaced_and_frames_use_grpc_if_none_can_be_bound(address, tmp_path):
    path = socket_beside(address)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    assert await connect_beside(address) is None  # no process listens there
    acceptor = SocketAcceptor()
    await acceptor.open(address)
    here, there = await both_ends(acceptor, address)
    here.close()
    there.close()
    await acceptor.close()
    assert not exists(path)
    far = SocketAcceptor()
    await far.open(f"unix:{tmp_path}/{'x' * 200}")
    assert await connect_beside(f"unix:{tmp_path}/{'x' * 200}") is None
    await far.close()


async def test_connections_are_accepted_again_after_too_many_open_files(address, monkeypatch):
    monkeypatch.setattr(socket_acceptor, "_RETRY_SECONDS", 0.01)
    loop, failures = asyncio.get_running_loop(), []

    async def accept(listening, taken=loop.sock_accept):
        if not failures:
            failures.append(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            raise failures[0]
        return await taken(listening)

    monkeypatch.setattr(loop, "sock_accept", accept)
    acceptor = SocketAcceptor()
    await acceptor.open(address)
    here, there = await both_ends(acceptor, address)
    assert failures
    here.close()
    there.close()
    await acceptor.close()


async def test_a_socket_with_a_listening_process_is_not_replaced(address):
    server, acceptor = GrpcServer(), SocketAcceptor()
    await server.start(address, ())
    await server.set_serving(True)
    await acceptor.open(address)
    try:
        for listen in (GrpcServer().start(address, ()), SocketAcceptor().open(address)):
            with pytest.raises(ConfigError, match=r"another process listens at .*service\.sock"):
                await listen
        assert await is_healthy(address)
        here, there = await both_ends(acceptor, address)
        here.close()
        there.close()
    finally:
        await acceptor.close()
        await server.stop(0)
    assert not exists(socket_beside(address))


async def test_a_server_replaces_a_socket_that_was_left_behind(address):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(address.removeprefix("unix:"))
    server = GrpcServer()
    await server.start(address, ())
    await server.set_serving(True)
    assert await is_healthy(address)
    await server.stop(0)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_of_any_type_or_with_a_full_backlog_is_in_use(tmp_path, kind):
    path = str(tmp_path / "socket")
    refuse_used_socket(path)
    refuse_used_socket(f"{tmp_path}/{'x' * 200}")  # binding reports the error
    with socket.socket(socket.AF_UNIX, kind) as other, socket.socket(socket.AF_UNIX) as waiting:
        other.bind(path)
        if kind == socket.SOCK_STREAM:
            other.listen(0)
            waiting.connect(path)
        with pytest.raises(ConfigError):
            refuse_used_socket(path)
    refuse_used_socket(path)


# --- with a service ---


class Servicer(target_pb2_grpc.TargetServiceServicer):
    def __init__(self, hub):
        self.hub = hub

    async def Verify(self, request_iterator, context):
        async with statuses(context):
            await self.hub.answer(context, target_pb2.VerifyRequest)


class Service:
    def __init__(self, address):
        self.address, self.engine = address, CountingEngine()

    async def __aenter__(self):
        self.loop = EngineLoop(lambda _: None)
        self.hub = StreamHub(self.loop, codec.verify_request_from_pb, codec.verify_response_to_pb)
        self.servicer, self.server = Servicer(self.hub), GrpcServer()
        target_pb2_grpc.add_TargetServiceServicer_to_server(self.servicer, self.server.server)
        await self.server.start(self.address, ())
        await self.hub.acceptor.open(self.address)
        self.loop.start(self.engine, self.hub.publish)
        return self

    async def __aexit__(self, *_):
        self.hub.close()
        await self.hub.acceptor.close()
        await self.server.stop(0)
        await asyncio.to_thread(self.loop.stop)


@pytest.fixture
async def service(address):
    async with Service(address) as running:
        yield running


async def socket_call(channel, address, peer=None):
    key = await connect_beside(address)
    call = target_pb2_grpc.TargetServiceStub(channel).Verify(metadata=(*key.metadata, *named(peer)))
    return SocketCall(call, key.connection), call


def named(peer):
    """Metadata with the name that a client calls itself by."""
    return [(PEER_METADATA, peer)] if peer else []


def opening(*requests):
    return codec.verify_request_to_pb(Message(opens=list(requests))).SerializeToString()


async def output_of(stream):
    return codec.verify_response_from_pb(target_pb2.VerifyResponse.FromString(await stream.read()))


async def test_a_stream_uses_its_socket(service, address):
    async with grpc.aio.insecure_channel(address) as channel:
        stream, _ = await socket_call(channel, address)
        await stream.write(opening(request(1, max_tokens=3)))
        tokens, reason = [], FinishReason.RUNNING
        while reason == FinishReason.RUNNING:
            for commit in (await output_of(stream)).commits:
                tokens += commit.tokens.tolist()
                reason = commit.finish_reason
        stream.cancel()
    assert tokens == [3, 4, 5]
    assert not service.hub._call_streams._streams


async def test_a_malformed_frame_ends_the_call_with_its_status(service, address):
    for bad in (b"\xff\xff", target_pb2.VerifyRequest(closes=b"123").SerializeToString()):
        async with grpc.aio.insecure_channel(address) as channel:
            stream, _ = await socket_call(channel, address)
            await stream.write(bad)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stream.read()
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(asyncio.InvalidStateError):
                await write_on(stream)


async def test_an_unexpected_error_ends_only_its_stream(service, address, monkeypatch):
    decode = service.hub._socket_streams._decode

    def surprised(frame):
        if frame.closes:
            raise ValueError("what is this?")
        return decode(frame)

    async with grpc.aio.insecure_channel(address) as channel:
        other, _ = await socket_call(channel, address)
        await other.write(opening(request(1, max_tokens=10**9)))
        await other.read()
        monkeypatch.setattr(service.hub._socket_streams, "_decode", surprised)
        stream, _ = await socket_call(channel, address)
        await stream.write(codec.verify_request_to_pb(Message(closes=[5])).SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        assert error.value.code() == grpc.StatusCode.UNKNOWN
        commits = [(await output_of(other)).commits for _ in range(50)]  # it goes on
        assert all(commits)
        assert service.loop.fault is None
        other.cancel()


@pytest.mark.parametrize("cut", ["call", "connection"])
async def test_sessions_end_with_either(service, address, cut):
    async with grpc.aio.insecure_channel(address) as channel:
        stream, call = await socket_call(channel, address)
        await stream.write(opening(request(1, max_tokens=10**9)))
        await stream.read()
        assert service.engine.sessions
        if cut == "call":
            call.cancel()
        else:
            stream._connection.close()
        await until(lambda: not service.engine.sessions)
        await until(call.done)


async def test_a_service_that_stops_ends_the_stream(address):
    async with grpc.aio.insecure_channel(address) as channel:
        async with Service(address):
            stream, call = await socket_call(channel, address)
            await stream.write(opening(request(1, max_tokens=10**9)))
            await stream.read()
            reading = asyncio.create_task(drained(stream))
        await asyncio.wait_for(reading, 10)
        assert call.done()


async def write_on(stream):
    while True:
        await stream.write(b"")
        await asyncio.sleep(0)


async def drained(stream):
    """Read until the end of the stream, in whatever way it ends."""
    try:
        while await stream.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass


async def test_a_peer_that_does_not_read_delays_no_other(service, address):
    """Output for this peer collects until it reads; others go on meanwhile."""
    async with grpc.aio.insecure_channel(address) as channel:
        other, _ = await socket_call(channel, address)
        key = await connect_beside(address)
        call = target_pb2_grpc.TargetServiceStub(channel).Verify(metadata=key.metadata)
        await write(key.connection, opening(request(1, max_tokens=3000)))
        await until(lambda: service.engine.sessions)
        await until(lambda: not service.engine.sessions)  # it has come to its end, and has not been heard
        await other.write(opening(request(2, max_tokens=1)))
        assert len((await output_of(other)).commits) == 1
        tokens, reason = [], FinishReason.RUNNING
        async with asyncio.timeout(20):
            while reason == FinishReason.RUNNING:
                for frame in key.connection.receive():
                    for commit in codec.verify_response_from_pb(target_pb2.VerifyResponse.FromString(frame)).commits:
                        tokens += commit.tokens.tolist()
                        reason = commit.finish_reason
                await asyncio.sleep(0)
        assert tokens == list(range(3, 3003))
        other.cancel()
        call.cancel()
        key.connection.close()


async def test_a_frame_longer_than_the_socket_buffer_arrives(service, address):
    async with grpc.aio.insecure_channel(address) as channel:
        stream, _ = await socket_call(channel, address)
        many = [request(name, prompt=range(1, 2000), max_tokens=1) for name in range(200)]  # 1.6 MB there
        await stream.write(opening(*many))
        heard = set()
        async with asyncio.timeout(20):
            while len(heard) < 200:
                heard |= {commit.session_id for commit in (await output_of(stream)).commits}
        stream.cancel()


# --- sessions belong to the stream that opened them ---


async def call_stream(channel, peer=None):
    """A stream over gRPC, with the methods of one over a socket."""
    return channel.stream_stream("/outrider.wire.v1.TargetService/Verify")(metadata=named(peer))


async def stream_over(transport, channel, address, peer=None):
    if transport == "socket":
        return (await socket_call(channel, address, peer))[0]
    return await call_stream(channel, peer)


async def failures_of(stream):
    """The next failures in a stream's output."""
    while not (failures := (await output_of(stream)).failures):
        pass
    return failures


async def commits_of(stream, session_id, count=30):
    """Frames with commits of a session, all of whose tokens follow one another."""
    last = None
    for _ in range(count):
        for commit in (await output_of(stream)).commits:
            assert commit.session_id == session_id
            assert last is None or commit.tokens[0] == last + 1
            last = commit.tokens[-1]


def closing(*sessions):
    return codec.verify_request_to_pb(Message(closes=list(sessions))).SerializeToString()


@pytest.mark.parametrize("owner_uses", ["grpc", "socket"])
@pytest.mark.parametrize("other_uses", ["grpc", "socket"])
async def test_a_stream_neither_opens_nor_closes_nor_feeds_sessions_of_another(
    service, address, owner_uses, other_uses
):
    fed = []
    service.engine.receive = lambda proposals, commits: fed.extend(one.session_id for one in proposals)

    async with grpc.aio.insecure_channel(address) as channel:
        owner, other = [await stream_over(transport, channel, address) for transport in (owner_uses, other_uses)]
        await owner.write(opening(request(1, max_tokens=10**9)))
        await owner.read()
        node = np.array([5], np.uint32), np.array([-1], np.int32), np.array([0.0], np.float32)
        feeding = Message(proposals=[Proposal(1, 2, 0, *node)], opens=[request(2, max_tokens=10**9)])
        for frame in (closing(1), opening(request(1, max_tokens=3)), codec.verify_request_to_pb(feeding)):
            await other.write(frame if isinstance(frame, bytes) else frame.SerializeToString())
        [failure] = await failures_of(other)
        assert (failure.session_id, type(failure.error)) == (1, Unavailable)
        await until(lambda: 2 in service.engine.sessions)
        await commits_of(owner, 1)
        other.cancel()
        await until(lambda: set(service.engine.sessions) == {1})
        assert fed == []
        await commits_of(owner, 1)
        await owner.write(closing(1))
        await until(lambda: not service.engine.sessions)
        owner.cancel()


@pytest.mark.parametrize("new_uses", ["grpc", "socket"])
@pytest.mark.parametrize("old_uses", ["grpc", "socket"])
async def test_a_peer_s_new_stream_ends_its_old_one(service, address, old_uses, new_uses):
    """The service may not have seen the loss of the old one yet, and what was sent on it may arrive late."""
    async with grpc.aio.insecure_channel(address) as channel:
        old = await stream_over(old_uses, channel, address, "secret")
        await old.write(opening(request(1, max_tokens=10**9), request(2, max_tokens=10**9)))
        await old.read()
        other = await call_stream(channel, "another")
        await other.write(opening(request(1, max_tokens=10**9)))
        assert await failures_of(other)
        new = await stream_over(new_uses, channel, address, "secret")
        await new.write(opening(request(1, max_tokens=10**9)))
        await commits_of(new, 1)
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await old.write(opening(request(1, max_tokens=10**9)))
        await until(lambda: set(service.engine.sessions) == {1})
        await commits_of(new, 1)
        old.cancel()
        await commits_of(new, 1)
        new.cancel()
        await until(lambda: not service.engine.sessions)
        other.cancel()
