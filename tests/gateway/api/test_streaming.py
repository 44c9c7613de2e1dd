"""Keep-alive comments of silent streams, which clients ignore."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import openai
import pytest

from gateway.api.answers.streaming import _LAST_SECONDS, CONNECTION, EventStream
from gateway.process.slow_readers import end_slow_readers
from outrider.errors import Overloaded

HELLO = [{"role": "user", "content": "hello"}]
COMMENT = b": keep-alive\n\n"
LONG = 60.0  # seconds, longer than any test


class Reply:
    """Events, before each of which `pause` is awaited, then an error, if there is one; and the only generation."""

    def __init__(self, events, pause, error=None):
        self._events, self._pause, self._error = events, pause, error
        self.closed = False

    async def events(self, generations):
        for event in self._events:
            await self._pause()
            yield event
        if self._error is not None:
            await self._pause()
            raise self._error

    def close(self):
        self.closed = True


class Line:
    """Records sent messages, and waits for comments."""

    def __init__(self):
        self.sent = []
        self._comment = asyncio.Event()

    async def send(self, message):
        self.sent.append(message)
        if message.get("body") == COMMENT:
            self._comment.set()

    async def receive(self):
        await asyncio.Event().wait()

    async def silence(self):
        self._comment.clear()
        await self._comment.wait()

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent)


async def silent(events, error=None):
    """The bytes sent for these events and the error, each preceded by a silence."""
    line = Line()
    reply = Reply(events, line.silence, error)
    await EventStream(reply, [reply], silence=0.001)({"type": "http"}, line.receive, line.send)
    assert reply.closed
    assert [message["type"] for message in line.sent[:2]] == ["http.response.start", "http.response.body"]
    assert not line.sent[-1].get("more_body")
    return line.body


@pytest.mark.parametrize(
    ("route", "sent", "create"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, lambda client: client.chat.completions.create),
        ("/v1/completions", {"prompt": "A"}, lambda client: client.completions.create),
        ("/v1/responses", {"input": "A"}, lambda client: client.responses.create),
    ],
)
def test_clients_ignore_keep_alive_comments(gateway, route, sent, create):
    body = {"model": "default", "stream": True, **sent}
    content = gateway.client.post(route, json={**body, "max_tokens": 30, "temperature": 0}).content
    events = [event + b"\n\n" for event in content.split(b"\n\n") if event]
    kept = asyncio.run(silent(events))
    assert kept.replace(COMMENT, b"") == content
    assert kept.count(COMMENT) >= len(events) > 2

    def answers(content):
        reply = httpx.Response(200, content=content, headers={"content-type": "text/event-stream"})
        http = httpx.Client(transport=httpx.MockTransport(lambda _: reply))
        with openai.OpenAI(base_url="http://gateway/v1", api_key="none", http_client=http) as client:
            return [event.model_dump() for event in create(client)(**body)]

    assert answers(kept) == answers(content)


async def test_an_error_after_a_comment_ends_the_stream_and_one_before_it_has_a_status():
    body = await silent([], Overloaded("no room"))
    assert body.startswith(COMMENT)
    message, done = body.replace(COMMENT, b"").removesuffix(b"\n\n").split(b"\n\n")
    assert json.loads(message.removeprefix(b"data: "))["error"]["code"] == "overloaded"
    assert done == b"data: [DONE]"

    async def at_once():
        pass

    line = Line()
    reply = Reply([], at_once, Overloaded("no room"))
    with pytest.raises(Overloaded):
        await EventStream(reply, [reply], silence=LONG)({"type": "http"}, line.receive, line.send)
    assert reply.closed
    assert not line.sent


async def test_a_disconnect_during_silence_ends_the_response():
    line = Line()

    async def gone():
        return {"type": "http.disconnect"}

    reply = Reply([b"data: {}\n\n"], line.silence)
    await EventStream(reply, [reply], silence=LONG)({"type": "http"}, gone, line.send)
    assert reply.closed
    assert line.sent[0]["status"] == 499


async def test_no_comment_is_sent_while_a_message_waits_for_its_client():
    """A send blocks while the client does not read; nothing may be sent after the end of the answer."""
    line, reads, sent = Line(), asyncio.Event(), []

    async def send(message):
        await line.send(message)
        if message.get("body") == b"data: {}\n\n":
            await reads.wait()

    async def at_once():
        pass

    class Watched(EventStream):
        async def _keep_alive(self, send):
            sent.append(len(line.sent))
            if len(sent) == 5:
                reads.set()
            return await super()._keep_alive(send) and 0.001  # called often

    reply = Reply([b"data: {}\n\n"], at_once)
    stream = Watched(reply, [reply], silence=0.0005)
    await stream({"type": "http"}, line.receive, send)
    assert line.body.replace(COMMENT, b"") == b"data: {}\n\n"
    assert line.body.endswith(b"data: {}\n\n")


async def test_a_stream_that_is_not_read_ends_at_its_deadline(caplog):
    async def at_once():
        pass

    async def stuck(message):
        if message.get("body"):
            await asyncio.Event().wait()

    reply = Reply([b"data: {}\n\n"], at_once)
    now = asyncio.get_running_loop().time()
    stream = EventStream(reply, [reply], silence=LONG, deadline=now - _LAST_SECONDS + 0.05)
    cuts = []
    connection = SimpleNamespace(cut=lambda: cuts.append(connection.last_event()))
    await asyncio.wait_for(stream({"type": "http", CONNECTION: connection}, Line().receive, stuck), 60)
    assert reply.closed
    assert b"deadline_exceeded" in cuts[0]
    assert "had not read all of it" in caplog.text


async def test_connections_whose_clients_do_not_read_are_closed(caplog):
    """Beside one that reads slowly, and one that waits for its next request."""
    made = []

    class Connection(asyncio.Protocol):
        client = "another"

        def connection_made(self, transport):
            self.transport = transport
            made.append(self)

        def cut(self):
            self.transport.abort()

        def connection_lost(self, exc):
            made.remove(self)

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0)
    watch = asyncio.create_task(end_slow_readers(made, 0.3))
    port = server.sockets[0].getsockname()[1]
    stalled, slow, idle = [await asyncio.open_connection("127.0.0.1", port, limit=1 << 16) for _ in range(3)]
    while len(made) < 3:
        await asyncio.sleep(0.01)
    by_port = {one.transport.get_extra_info("peername")[1]: one for one in made}
    ports = [writer.get_extra_info("sockname")[1] for _, writer in (stalled, slow, idle)]
    for one in ports[:2]:
        by_port[one].transport.write(bytes(64 << 20))
    stalled[1].transport.pause_reading()
    end = loop.time() + 20
    while by_port[ports[0]] in made:
        assert len(await slow[0].read(1 << 18)) > 0
        await asyncio.sleep(0.01)
        assert loop.time() < end
    assert [by_port[one] in made for one in ports[1:]] == [True, True]
    assert "has not read for" in caplog.text
    watch.cancel()
    for _, writer in (stalled, slow, idle):
        writer.transport.abort()
    server.close()
