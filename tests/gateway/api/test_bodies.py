"""Parsing of request http."""

import asyncio
import json
import threading

import pytest

from gateway.api.requests import http
from tests.support.gateway.http import error_of

LARGE = http.LARGE
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "text",
    [
        "[1, -2, 1e5, 1.50, -0, -0.0, 123456789012345678901234567890, 1E400, NaN, Infinity, -Infinity]",
        '{"a": {"a": [], "b": {}}, "a": {"b": true, "c": null}, "d": "\\u00e4\\ud83d"}',
        "7",
    ],
)
def test_large_bodies_are_parsed_like_small_ones(text):
    """With the same types: 1.0 is not an integer."""
    assert repr(http.parse_yielding(text.encode())) == repr(json.loads(text))


@pytest.mark.parametrize("text", ["", "[1,", '{"a": 01}', "[" + "9" * 5000 + "]", '"\n"'])
def test_large_bodies_are_refused_like_small_ones(text):
    with pytest.raises(ValueError, match=r"\w") as one:
        http.parse_yielding(text.encode())
    with pytest.raises(ValueError, match=r"\w") as other:
        json.loads(text)
    assert repr(one.value) == repr(other.value)


@pytest.mark.parametrize("large", [False, True])
def test_only_large_bodies_are_parsed_in_a_yielding_thread(monkeypatch, large):
    """The thread yields through Python callbacks for numbers and objects."""
    calls = []

    def note(value):
        calls.append(threading.current_thread())
        return value

    monkeypatch.setattr(http, "_integer", note)
    monkeypatch.setattr(http, "_object", note)
    body = json.dumps({"prompt": [5] * 3, "x": " " * LARGE * large}).encode()

    async def receive():
        return {"type": "http.request", "body": body}

    async def read():
        content = await http._Request({"type": "http", "headers": []}, receive).json()
        return content, threading.current_thread()

    content, loop = asyncio.run(read())
    assert len(content["prompt"]) == 3
    assert len(calls) == 4 * large
    assert loop not in calls


def test_large_requests_are_answered_and_refused(gateway):
    def post(body, status):
        response = gateway.client.post("/v1/completions", content=body, headers=JSON)
        return response.json() if status == 200 else error_of(response, status)

    space = b" " * LARGE
    assert post(b'{"prompt": "A", "max_tokens": 1, "temperature": 0%s}' % space, 200)["choices"][0]["text"] == "B"
    assert post(b'{"prompt": "A", "max_tokens": 1.0%s}' % space, 400)["param"] == "max_tokens"
    assert post(b'{"prompt": "A",%s}' % space, 400)["code"] == "invalid_json"
    assert post(b'{"prompt": "\\ud83d"%s}' % space, 400)["param"] == "prompt"
    assert post(b'{"prompt": %s}' % (b"[" * LARGE), 400)["code"] == "invalid_json"
