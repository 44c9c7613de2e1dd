"""The guard of a gRPC port: a call without the token is refused before its messages are read; limits of the port."""

import asyncio
import contextlib
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.service_token import token_check, token_metadata, with_token
from outrider.supervisor.health import is_healthy
from outrider.transport import guard, rpc
from outrider.transport.guard import Limits
from outrider.transport.rpc import GrpcServer
from tests.support.gateway.services import free_port

TOKEN = "a-token-of-the-tests"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
SIZES = {"/a.B/stream_stream": 5 << 20}


class Echo:
    """A service with a method of each kind, whose messages are bytes. parsed: sizes of messages that were parsed."""

    def __init__(self, **options):
        self.parsed = []
        self.address = f"127.0.0.1:{free_port()}"
        self.server = GrpcServer(**options)
        made = {
            "unary_unary": grpc.unary_unary_rpc_method_handler(self.unary, self.parse),
            "unary_stream": grpc.unary_stream_rpc_method_handler(self.parts, self.parse),
            "stream_unary": grpc.stream_unary_rpc_method_handler(self.whole, self.parse),
            "stream_stream": grpc.stream_stream_rpc_method_handler(self.both, self.parse),
        }
        self.server.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("a.B", made)])

    def parse(self, content):
        self.parsed.append(len(content))
        return content

    async def unary(self, request, context):
        return b"ok"

    async def parts(self, request, context):
        for part in (b"o", b"k"):
            yield part

    async def whole(self, requests, context):
        async with rpc_statuses(context):
            async for _ in requests:
                pass
        return b"ok"

    async def both(self, requests, context):
        async with rpc_statuses(context):
            while await context.read() is not grpc.aio.EOF:
                await context.write(b"ok")

    async def __aenter__(self):
        await self.server.start(self.address, ["a.B"])
        return self

    async def __aexit__(self, *_):
        await self.server.stop(0)


@contextlib.asynccontextmanager
async def rpc_statuses(context):
    from outrider.transport.statuses import statuses

    async with statuses(context):
        yield


async def once(messages):
    for message in messages:
        yield message


async def outcome(channel, kind, message):
    """The answer to a call with one message, or the status of its refusal."""
    method = getattr(channel, kind)(f"/a.B/{kind}")
    request = once([message]) if kind.startswith("stream") else message
    try:
        if kind.endswith("unary"):
            return await method(request)
        return b"".join([part async for part in method(request)])
    except grpc.aio.AioRpcError as error:
        return error.code()


BIG = [("grpc.max_send_message_length", 1 << 30)]


async def test_a_call_without_the_token_is_refused_before_a_message_is_read():
    async with Echo(check=token_check(TOKEN)) as echo, grpc.aio.insecure_channel(echo.address, BIG) as channel:
        for kind in KINDS:
            for message in (b"", b"x" * (3 << 20)):
                assert await outcome(channel, kind, message) is grpc.StatusCode.UNAUTHENTICATED
                with pytest.raises(grpc.aio.AioRpcError, match="another service token"):
                    await channel.unary_unary("/a.B/unary_unary")(message, metadata=token_metadata(TOKEN + "x"))
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await channel.unary_unary("/a.B/unknown")(b"x" * (3 << 20))
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="no service token"):
            [_ async for _ in stub.ServerReflectionInfo(once([listing]))]
        assert echo.parsed == []
        authorized = with_token(channel, TOKEN)
        assert [await outcome(authorized, kind, b"x") for kind in KINDS] == [b"ok"] * 4
        stub = reflection_pb2_grpc.ServerReflectionStub(authorized)
        assert [_ async for _ in stub.ServerReflectionInfo(once([listing]))]
        assert echo.parsed == [1] * 4


async def test_health_checks_need_no_token_and_report_progress_only_to_those_who_have_it(monkeypatch):
    monkeypatch.setattr(rpc, "MAX_WATCHES", 2)
    async with Echo(check=token_check(TOKEN)) as echo:
        echo.server.set_progress("cannot be loaded: /models/secret")
        reported = []
        await echo.server.set_serving(True)
        assert await is_healthy(echo.address, on_progress=reported.append)
        assert reported == []
        assert await is_healthy(echo.address, on_progress=reported.append, token=TOKEN)
        assert reported == ["cannot be loaded: /models/secret"]
        async with grpc.aio.insecure_channel(echo.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch
            calls = [watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
            assert [(await call.read()).status for call in calls] == [health_pb2.HealthCheckResponse.SERVING] * 2
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await watch(health_pb2.HealthCheckRequest()).read()
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            gateway = health_pb2_grpc.HealthStub(with_token(channel, TOKEN)).Watch(health_pb2.HealthCheckRequest())
            assert (await gateway.read()).status == health_pb2.HealthCheckResponse.SERVING
            calls[0].cancel()

            async def watched():
                with contextlib.suppress(grpc.aio.AioRpcError):
                    return await watch(health_pb2.HealthCheckRequest()).read()

            async with asyncio.timeout(60):
                while not await watched():
                    await asyncio.sleep(0.01)


async def test_a_message_larger_than_its_method_allows_is_not_parsed():
    limits = Limits(sizes=SIZES, other_size=1000)
    async with Echo(limits=limits) as echo, grpc.aio.insecure_channel(echo.address, BIG) as channel:
        for kind in KINDS:
            size = SIZES.get(f"/a.B/{kind}", 1000)
            assert await outcome(channel, kind, b"x" * size) == b"ok"
            assert await outcome(channel, kind, b"x" * (size + 1)) is grpc.StatusCode.INVALID_ARGUMENT
        assert sorted(echo.parsed) == [1000] * 3 + [5 << 20]
        # A message that gRPC itself drops is not read as a whole.
        assert await outcome(channel, "stream_stream", b"x" * (65 << 20)) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_methods_that_take_large_messages_are_those_of_the_services():
    from outrider.wire.v1 import draft_pb2, target_pb2

    known = {
        f"/{service.full_name}/{method.name}": method
        for pb in (draft_pb2, target_pb2)
        for service in pb.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    streams = {name for name, method in known.items() if method.client_streaming}
    assert set(guard.SERVICE_SIZES) == streams, "only streams have large messages"


def closed(connection):
    """True if the peer closes a connection, whatever it sends before."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # with empty settings


@pytest.mark.parametrize(("sent", "name"), [(b"", "handshake_ms"), (PREFACE, "idle_ms"), (PREFACE, "ping_ms")])
async def test_silent_connections_are_closed(sent, name):
    """A peer that sends nothing; one that makes no call; one that answers no ping."""
    async with Echo(limits=Limits(**{name: 300})) as echo:
        host, port = echo.address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
            connection.settimeout(10)
            assert await asyncio.to_thread(closed, connection)


async def test_connections_above_the_limit_are_closed():
    async with Echo(limits=Limits(connections=2)) as echo:
        host, port = echo.address.split(":")
        with contextlib.ExitStack() as stack:
            first, second, third = (stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(3))
            third.settimeout(10)
            third.sendall(PREFACE)
            assert await asyncio.to_thread(closed, third)
            first.sendall(PREFACE)
            first.settimeout(10)
            assert await asyncio.to_thread(first.recv, 100)
            second.close()


async def test_calls_of_a_connection_are_limited():
    async with Echo(limits=Limits(calls=1)) as echo, grpc.aio.insecure_channel(echo.address) as channel:
        first = channel.stream_stream("/a.B/stream_stream")()
        await first.write(b"x")
        assert await first.read() == b"ok"
        second = channel.stream_stream("/a.B/stream_stream")()
        waiting = asyncio.create_task(second.write(b"x"))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        first.cancel()
        await asyncio.wait_for(waiting, 60)
        assert await second.read() == b"ok"
        second.cancel()
