"""Frames over a socket beside gRPC: connection and call belong together, whichever arrives or ends first."""

import asyncio
import errno
import os
import socket
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.errors import ConfigError, InvalidRequest, Unavailable
from outrider.process.ports import refuse_used_socket
from outrider.supervisor.health import is_healthy
from outrider.transport import frame_socket, socket_acceptor
from outrider.transport.frame_socket import FrameSocket, connect_beside, socket_beside
from outrider.transport.rpc import GrpcServer
from outrider.transport.socket_acceptor import SocketAcceptor
from tests.support.outrider.frame_sockets import write


def exists(path):
    return os.path.exists(path)


def call_of(key):
    return SimpleNamespace(invocation_metadata=lambda: key.metadata)


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
