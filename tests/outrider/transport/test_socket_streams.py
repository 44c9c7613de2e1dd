"""Streams of a service whose frames use a socket beside the call."""

import asyncio
import contextlib

import grpc
import numpy as np
import pytest

from outrider.errors import Unavailable
from outrider.serving.loop import EngineLoop
from outrider.serving.messages import Message
from outrider.speculation.proposal import FinishReason, Proposal
from outrider.transport.frame_socket import SocketCall, connect_beside
from outrider.transport.rpc import GrpcServer
from outrider.transport.statuses import statuses
from outrider.transport.stream import PEER_METADATA, StreamHub
from outrider.wire import codec
from outrider.wire.v1 import target_pb2, target_pb2_grpc
from tests.support.outrider.counting import CountingEngine, request, until
from tests.support.outrider.frame_sockets import write


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


# --- with a service ---


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
        await asyncio.wait_for(reading, 60)
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
        await until(lambda: not service.engine.sessions)  # it has come to its end, and has not been read
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
        received = set()
        async with asyncio.timeout(20):
            while len(received) < 200:
                received |= {commit.session_id for commit in (await output_of(stream)).commits}
        stream.cancel()


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


# --- sessions belong to the stream that opened them ---


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
