"""HTTP connections before their requests: silent, slow, endless and too many ones, against the real server."""

import asyncio
import contextlib
import itertools
import resource
import socket

import pytest

from gateway.api.answers.streaming import EventStream
from gateway.process.connections import Connections, possible_connections
from gateway.process.listeners import start_rest, stop_rest
from gateway.process.slow_readers import end_slow_readers

TIMEOUT = 0.15  # seconds
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class App:
    """Answers at once; GET /held when it is released, GET /endless with events until the client has gone."""

    def __init__(self):
        self.release, self.held, self.ended = asyncio.Event(), 0, asyncio.Event()

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/endless":
            await EventStream(self, [self], silence=60.0)(scope, receive, send)
            return
        if scope["path"] == "/held":
            self.held += 1
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def events(self, generations):
        while True:
            yield b"data: " + b"x" * 50_000 + b"\n\n"
            await asyncio.sleep(0)

    def close(self):
        self.ended.set()


class Client:
    """One connection."""

    @classmethod
    async def to(cls, port):
        made = cls()
        made.reader, made.writer = await asyncio.open_connection("127.0.0.1", port)
        return made

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def status(self):
        """Of the next answer."""
        async with asyncio.timeout(60):
            head = await self.reader.readuntil(b"\r\n\r\n")
            if b"content-length: 2" in head:
                assert await self.reader.readexactly(2) == b"ok"
        return int(head.split()[1])

    async def closed(self):
        """The data that came before the server closed the connection."""
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read()
        return b""


@contextlib.asynccontextmanager
async def serving(limit):
    """The app, its port and its connections."""
    app, unread = App(), itertools.count()
    limits = Connections(limit, TIMEOUT, lambda: next(unread))
    limits.counted = unread
    listener = socket.create_server(("127.0.0.1", 0))
    server = start_rest(app, listener, None, limits)
    limits.open = server[0].server_state.connections
    port = listener.getsockname()[1]
    clients = []

    async def connect():
        clients.append(await Client.to(port))
        return clients[-1]

    try:
        yield app, connect, limits
    finally:
        app.release.set()
        for client in clients:
            client.writer.close()
        await stop_rest(server)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HT",
        REQUEST[:-2],
        REQUEST + b"GET /again HTTP/1.1\r\n",  # on a connection that is kept
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\nx",  # answered before its body came
    ],
    ids=["silent", "line", "headers", "kept", "body"],
)
async def test_a_connection_without_a_request_is_closed_in_time(sent):
    async with serving(9) as (_, connect, limits):
        client = await connect()
        if sent:
            await client.send(sent)
        start = asyncio.get_running_loop().time()
        while b"\r\n" in sent and asyncio.get_running_loop().time() < start + 5:  # the rest comes byte by byte
            with contextlib.suppress(ConnectionError):
                await client.send(b"y")
            await asyncio.sleep(TIMEOUT / 10)
            if limits.count == 0:
                break
        await client.closed()
        assert limits.count == 0
        assert asyncio.get_running_loop().time() < start + 4


async def test_a_slow_answer_is_not_closed():
    async with serving(9) as (app, connect, _):
        client = await connect()
        await client.send(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(2 * TIMEOUT)
        app.release.set()
        assert await client.status() == 200
        await client.send(REQUEST * 2)
        assert [await client.status() for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("first", [b"GET /", b"GET / HTTP/1.1\r\nhost: x\r\nlong: ", REQUEST[:-2]])
async def test_endless_headers_are_refused(first):
    async with serving(9) as (_, connect, _):
        client = await connect()
        with contextlib.suppress(ConnectionError):
            await client.send(first)
            for _ in range(20):
                await client.send((b"a" * 4000 + b": b\r\n") if first.endswith(b"\n") else b"a" * 4000)
        assert (await client.closed()).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("endless", [b"5;" + b"x" * 400_000, b"0\r\n" + b"trailer: x\r\n" * 40_000])
async def test_endless_chunks_and_trailers_end_a_request(endless):
    async with serving(9) as (app, connect, limits):
        client = await connect()
        await client.send(b"POST /held HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        with contextlib.suppress(ConnectionError):
            await client.send(endless)
        await client.closed()
        assert (app.held, limits.count) == (1, 0)


async def test_large_bodies_are_no_headers():
    async with serving(9) as (_, connect, _):
        client = await connect()
        body = b"x" * 300_000
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert await client.status() == 200
        await client.send(REQUEST)
        assert await client.status() == 200


async def test_a_new_connection_takes_the_place_of_the_longest_waiting_one():
    async with serving(2) as (app, connect, limits):
        first, second = await connect(), await connect()
        await first.send(REQUEST)
        assert await first.status() == 200  # now the second has waited longest
        third = await connect()
        assert await second.closed() == b""
        for client in (first, third):
            await client.send(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")
        while app.held < 2:
            await asyncio.sleep(0)
        fourth = await connect()
        assert (await fourth.closed()).startswith(b"HTTP/1.1 503")
        assert limits.count == 2
        app.release.set()
        assert [await client.status() for client in (first, third)] == [200, 200]
        fifth = await connect()
        await fifth.send(REQUEST)
        assert await fifth.status() == 200


@pytest.mark.parametrize(
    ("limits", "raised", "possible"),
    [
        ((1024, 1 << 20), [(8448, 1 << 20)], 8192),
        ((1 << 20, 1 << 20), [], 8192),
        ((1024, 4096), [(4096, 4096)], 3840),
        ((1024, resource.RLIM_INFINITY), [(8448, resource.RLIM_INFINITY)], 8192),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), [], 8192),
    ],
)
def test_no_more_connections_than_files_may_be_open(monkeypatch, caplog, limits, raised, possible):
    done = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: done.append(wanted))
    assert possible_connections(8192) == possible
    assert done == raised
    assert ("ulimit" in caplog.text) == (possible < 8192)


@pytest.mark.parametrize("resumes", [True, False])
async def test_a_client_that_did_not_read_gets_the_reason_once_it_reads(monkeypatch, resumes):
    monkeypatch.setattr("gateway.process.connections._CUT_SECONDS", 10.0 if resumes else 0.1)
    async with serving(9) as (app, connect, limits):
        client = await connect()
        client.writer.transport.pause_reading()
        await client.send(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        watch = asyncio.create_task(end_slow_readers(limits.open, 0.2))
        await asyncio.wait_for(app.ended.wait(), 10)  # its session is closed
        assert next(limits.counted) == 1
        if not resumes:
            while limits.count:
                await asyncio.sleep(0.01)
        client.writer.transport.resume_reading()
        whole = await client.closed()
        watch.cancel()
    assert (b"did not read its answer" in whole, whole.endswith(b"0\r\n\r\n")) == (resumes, resumes)
