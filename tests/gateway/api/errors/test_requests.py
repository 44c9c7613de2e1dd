"""Errors of whole requests: bodies that are refused before their fields are read, routes, services, the gateway."""

import asyncio
import json

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from gateway.api.answers import errors
from gateway.api.answers.streaming import EventStream
from gateway.api.middleware import EdgeMiddleware
from gateway.api.requests import http
from gateway.api.requests.responses import ResponsesBody
from gateway.api.requests.schemas import ChatBody
from gateway.api.routes.tokens import TokenizeBody
from gateway.text.encoding import MAX_PIECES
from tests.support.gateway.engines import BUSY, REFUSED
from tests.support.gateway.http import error_of
from tests.support.gateway.services import until
from tests.support.gateway.texts import HELLO


@pytest.mark.parametrize(
    ("content", "words", "code"),
    [
        (b"", "missing", "invalid_value"),
        (b"{", "no valid JSON", "invalid_json"),
        (b"[1, 2]", "object", "invalid_value"),
        (b"null", "JSON object", "invalid_value"),
        (b'"text"', "object", "invalid_value"),
        (b"\xff\xfe", "no valid JSON", "invalid_json"),
        (b'{"prompt": "\xff"}', "UTF-8", "invalid_json"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "numbers", "invalid_json"),
        (b'{"x": ' + b"[" * 99999 + b"]" * 99999 + b"}", "deep", "invalid_json"),
    ],
)
def test_bodies_other_than_json_objects_are_400(gateway, content, words, code):
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        error = error_of(gateway.client.post(path, content=content, headers=headers), 400)
        assert (words in error["message"], error["code"], error["param"]) == (True, code, None)


def pieces(name, piece):
    """One message with the largest number of pieces."""
    return [{"role": "user", name: [piece] * (MAX_PIECES - 1)}]


PLAIN = {"role": "user", "content": "x"}
PARTS = pieces("content", {"type": "text", "text": ""})
CALLS = pieces("tool_calls", {"function": {"name": "f"}})


@pytest.mark.parametrize(
    ("body", "param", "fits"),
    [
        (ChatBody, "messages", [PLAIN] * MAX_PIECES),
        (ChatBody, "messages", PARTS),
        (ChatBody, "messages", CALLS),
        (TokenizeBody, "messages", PARTS),
        (ResponsesBody, "input", [PLAIN] * MAX_PIECES),
        (ResponsesBody, "input", PARTS),
    ],
)
def test_conversations_are_bounded_before_validation(body, param, fits):
    """A million of them would block the event loop for seconds."""
    body.model_validate({param: fits})
    with pytest.raises(ValidationError) as error:
        body.model_validate({param: [*fits, 5]})
    (returned,) = error.value.errors()
    assert (returned["loc"], str(MAX_PIECES) in returned["msg"]) == ((param,), True)


def nested(count):
    schema = {}
    for _ in range(count):
        schema = {"properties": {"a": schema}}
    return schema


BRACKETS = "[" * 99999
TOO_DEEP = {"type": "function", "function": {"name": "f", "parameters": nested(400)}}


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        ("/v1/chat/completions", {"tools": [TOO_DEEP], "tool_choice": "required"}, None),
        ("/v1/completions", {"json_schema": BRACKETS}, "json_schema"),
        ("/generate", {"sampling_params": {"json_schema": BRACKETS}}, "json_schema"),
    ],
)
def test_deep_nesting_is_refused(gateway, path, changes, param):
    sent = {"messages": HELLO} if "chat" in path else {"prompt": "A", "text": "A"}
    error = error_of(gateway.client.post(path, json=sent | changes), 400)
    assert ("too deep" in error["message"], error["param"]) == (True, param)


def test_unparsable_arguments_are_passed_as_text(gateway):
    call = {"id": "c", "function": {"name": "f", "arguments": BRACKETS}}
    body = {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}
    error = error_of(gateway.client.post("/v1/chat/completions", json=body), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "application/x-www-form-urlencoded"}])
def test_other_content_types_are_415(gateway, headers):
    """curl -d sends another type. Other sites can send it without a preflight request."""
    error = error_of(gateway.client.post("/v1/completions", content=b'{"prompt": "A"}', headers=headers), 415)
    assert error["code"] == "unsupported_media_type"
    assert "Content-Type: application/json" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/chat/completions",
            {"messages": [*HELLO, {"role": "user", "content": "hi \ud83d"}]},
            "messages.1.content",
        ),
        ("/v1/chat/completions", {"messages": HELLO, "model": "\ud83d"}, "model"),
        ("/v1/chat/completions", {"messages": HELLO, "regex": "\ude00"}, "regex"),
        ("/v1/chat/completions", {"messages": HELLO, "user": "\ud83d", "stream": True}, "user"),
        ("/v1/chat/completions", {"messages": HELLO, "x": {"\ud83d": 1}}, "x"),
        ("/v1/completions", {"prompt": ["a", "\ud83d"]}, "prompt.1"),
        ("/v1/responses", {"input": "\ud83d"}, "input"),
        ("/generate", {"text": "\ud83d"}, "text"),
        ("/tokenize", {"prompt": "\ud83d"}, "prompt"),
        ("/abort_request", {"rid": "\ud83d"}, "rid"),
        ("/update_weights_from_disk", {"model_path": "m", "weight_version": "\ud83d"}, "weight_version"),
        ("/generate", {"text": "A", "x": [{"a": [], "b": [1, "a", ["\ud83d"]]}, "\ude00"]}, "x.0.b.2.0"),
    ],
)
def test_lone_surrogates_are_refused_by_name(gateway, path, body, param):
    """A client that cuts a text within a surrogate pair sends them."""
    headers = {"Content-Type": "application/json"} | gateway.admin
    answer = gateway.client.post(path, content=json.dumps(body).encode(), headers=headers)
    assert error_of(answer, 400)["param"] == param


def test_lone_surrogates_are_refused_in_utf_16(gateway):
    headers = {"Content-Type": "application/json"}
    content = json.dumps({"prompt": "\ud83d"}).encode("utf-16")
    assert error_of(gateway.client.post("/v1/completions", content=content, headers=headers), 400)["param"] == "prompt"


def test_an_error_may_quote_a_lone_surrogate(gateway):
    content = json.dumps({"tokens": [5], "model": "\ud83d"}).encode()
    headers = {"Content-Type": "application/json"}
    error = error_of(gateway.client.post("/detokenize", content=content, headers=headers), 404)
    assert (error["code"], "\\ud83d" in error["message"]) == ("model_not_found", True)


def test_lone_surrogates_are_found_in_one_pass(monkeypatch):
    """Deep nesting must not multiply the time."""
    seen = []
    monkeypatch.setattr(http, "is_valid", lambda text: seen.append(text) or text.isascii())
    content = ["a", "\ud83d"]
    for _ in range(500):
        content = ["a", content]
    assert http.surrogate_path(content) == ".".join(["1"] * 501)
    assert len([text for text in seen if not text.isdigit()]) == 502


def test_surrogate_pairs_are_accepted(gateway):
    body = json.dumps({"prompt": "\U0001f600 \\ud83d", "max_tokens": 1}).encode()
    assert b"\\ud83d\\ude00" in body
    headers = {"Content-Type": "application/json"}
    assert gateway.client.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_bodies_that_are_too_large_are_413(gateway):
    large = b'{"prompt": "' + b"a" * (5 << 20) + b'"}'
    error_of(gateway.client.post("/v1/completions", content=large), 413)

    def parts():
        for start in range(0, len(large), 1 << 16):
            yield large[start : start + (1 << 16)]

    kind = {"content-type": "application/json"}
    error_of(gateway.client.post("/v1/completions", content=parts(), headers=kind), 413)
    assert gateway.text("A", max_tokens=2) == "BC"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate"])
def test_a_body_that_grows_too_large_after_valid_json_is_not_processed(gateway, target, route, stream):
    sent = {"prompt": "A", "messages": HELLO, "input": "A", "text": "A", "stream": stream}

    def parts():
        yield json.dumps(sent).encode()
        for _ in range(5):
            yield b" " * (1 << 20)

    before = target.engine.opened
    headers = {"Content-Type": "application/json"}
    error = error_of(gateway.client.post(route, content=parts(), headers=headers), 413)
    assert error["code"] == "request_too_large"
    assert gateway.text("A", max_tokens=2) == "BC"
    assert target.engine.opened == before + 1


async def test_a_disconnect_is_reported_after_a_body_that_is_too_large():
    messages = [{"type": "http.request", "body": b"12345678", "more_body": True}, {"type": "http.disconnect"}]
    received, sent = [], []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        with pytest.raises(HTTPException):
            await receive()
        received.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})

    edge = EdgeMiddleware(max_body_bytes=7)
    edge.app = app
    await edge({"type": "http", "path": "/", "headers": []}, receive, send)
    assert received == [{"type": "http.disconnect"}]
    assert sent[0]["status"] == 413


async def test_a_body_that_pauses_for_too_long_is_408():
    """Whatever the app made of the part that it has; a request without one may wait for the client to leave."""
    parts, sent = [{"type": "http.request", "body": b"{}", "more_body": True}], []

    async def receive():
        if not parts:
            await asyncio.Event().wait()
        return parts.pop()

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        await receive()
        with pytest.raises(HTTPException):
            await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    edge = EdgeMiddleware(max_body_bytes=7, client_timeout=0.02)
    edge.app = app
    await edge({"type": "http", "path": "/", "headers": []}, receive, send)
    assert sent[0]["status"] == 408
    assert dict(sent[0]["headers"])[b"connection"] == b"close"

    async def waits(scope, receive, send):
        await receive()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    edge.app = waits
    parts.append({"type": "http.request", "body": b"{}"})
    await edge({"type": "http", "path": "/", "headers": []}, receive, send)
    assert sent[-1]["status"] == 200


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
