"""Errors of routes, services and the gateway itself: their status, in answers and in streams that have begun."""

import asyncio
import json

import httpx
import pytest
from fastapi import FastAPI

from gateway.api.answers import errors
from gateway.api.answers.streaming import EventStream
from gateway.api.middleware import EdgeMiddleware
from tests.support.gateway.engines import BUSY, REFUSED
from tests.support.gateway.http import error_of
from tests.support.gateway.services import until


def test_unknown_routes_and_wrong_methods(gateway):
    error_of(gateway.client.get("/v1/nothing"), 404)
    error_of(gateway.client.post("/v1/embeddings", json={}), 404)
    error_of(gateway.client.get("/v1/completions"), 405)
    assert gateway.client.head("/v1/completions").status_code == 405
    error_of(gateway.client.delete("/v1/models"), 405)


@pytest.mark.parametrize("started", [False, True])
async def test_a_request_cut_by_shutdown_gets_503(started):
    """The client stalls while it sends the body or reads the answer."""
    edge, begun, sent = EdgeMiddleware(max_body_bytes=7), asyncio.Event(), []

    async def app(scope, receive, send):
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        begun.set()
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    edge.app = app
    scope = {"type": "http", "path": "/v1/completions", "headers": []}
    task = asyncio.create_task(edge(scope, None, send))
    await begun.wait()
    task.cancel()  # as uvicorn does, which logs errors with their traceback
    await task
    assert sent[0]["status"] == (200 if started else 503)
    assert len(sent) == (1 if started else 2)
    if not started:
        assert dict(sent[0]["headers"])[b"retry-after"] == b"1"
        assert b"shutting down" in sent[1]["body"]


def test_errors_of_the_target_keep_their_status_in_streams(gateway):
    body = {"prompt": [REFUSED], "stream": True}
    error = error_of(gateway.client.post("/v1/completions", json=body), 400)
    assert "does not like" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_reported_before_the_answer_begins(gateway, stream):
    before = gateway.metric("outrider_requests_total", outcome="overloaded")
    response = gateway.client.post("/v1/completions", json={"prompt": [5, BUSY], "stream": stream})
    error = error_of(response, 503)
    assert error["code"] == "overloaded"
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert "retry later" in error["message"]
    assert gateway.metric("outrider_requests_total", outcome="overloaded") == before + 1


def test_bad_requests_leave_no_session_behind(gateway, target, draft):
    gateway.client.post("/v1/completions", json={"prompt": ["A", "B", [1]], "max_tokens": 300})
    gateway.client.post("/v1/completions", json={"prompt": [[5], [REFUSED], [6]], "max_tokens": 300, "temperature": 0})
    until(lambda: target.sessions == 0 and draft.sessions == 0)


async def test_unexpected_errors_are_reported_without_details_and_close_the_connection():
    app = FastAPI()
    errors.install(app)

    @app.get("/")
    async def fails():
        raise ValueError("a path of this machine")

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        response = await client.get("/")
    assert error_of(response, 500)["code"] == "internal_error"
    assert "path" not in response.text
    assert (response.headers["connection"], response.headers["x-should-retry"]) == ("close", "false")


async def test_unexpected_errors_end_a_stream_like_other_errors():
    async def receive():
        await asyncio.Event().wait()

    sent = []

    async def send(message):
        sent.append(message)

    class Failing:
        closed = False

        async def events(self, generations):
            yield b"data: {}\n\n"
            raise ValueError("a path of this machine")

        def close(self):
            self.closed = True

    reply = Failing()
    await EventStream(reply, [reply])({"type": "http"}, receive, send)
    first, returned, done, end = b"".join(message.get("body", b"") for message in sent).split(b"\n\n")
    assert (first, done, end) == (b"data: {}", b"data: [DONE]", b"")
    assert json.loads(returned.removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert b"path" not in returned
    assert reply.closed
    assert not sent[-1].get("more_body")
