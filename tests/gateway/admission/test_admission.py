"""Admission: API keys, origins, request limits, and draining."""

import json
import signal
import subprocess
import threading
from contextlib import contextmanager
from functools import partial

import httpx
import openai
import pytest

from outrider.client import Client
from outrider.errors import Unauthenticated
from tests.support.gateway.engines import expected, tokenizer
from tests.support.gateway.services import Gateway, answers, until

A = tokenizer().encode("A").ids
LONG = {"prompt": "A", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
KEY = {"authorization": "Bearer alpha"}


@contextmanager
def gateway_with(folder, target, draft, **flags):
    process = Gateway(folder, [target.address], [draft.address], **flags).wait()
    try:
        yield process
    finally:
        assert process.stop() == 0


@contextmanager
def slow(target, delay):
    target.engine.delay = delay
    try:
        yield
    finally:
        target.engine.delay = target.delay


@pytest.fixture(scope="module")
def guarded(folder, target, draft):
    flags = {
        "api_key": ["alpha", "beta"],
        "admin_api_key": "superior",
        "max_requests_per_key": 1,
        "max_pending_requests": 2,
    }
    with gateway_with(folder, target, draft, **flags, allowed_origins=["https://page.example"]) as process:
        yield process


# --- keys ---


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer gamma"}, {"authorization": "alpha"}])
@pytest.mark.parametrize("path", ["/v1/models", "/tokenizer_info", "/openapi.json", "/get_server_info", "/nowhere"])
def test_routes_require_a_key(guarded, path, headers):
    response = guarded.client.get(path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/health_generate", "/metrics"])
def test_health_and_metrics_require_no_key(guarded, path):
    assert guarded.client.get(path).status_code == 200


def test_each_key_opens_its_routes(guarded):
    for key in ("alpha", "beta", "superior"):
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as client:
            answer = client.completions.create(model="default", prompt="A", max_tokens=1, temperature=0)
        assert answer.choices[0].text == "B"
    unknown = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="x", max_retries=0)
    with unknown as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    root = {"authorization": "Bearer superior"}
    for many in ({"abort_all": True}, {"rid": "a", "prefix": True}):
        abort = partial(guarded.client.post, "/abort_request", json=many)
        assert abort(headers=KEY).status_code == 401  # the administrator has another key
        assert abort(headers=root).status_code == 200
    assert guarded.client.post("/abort_request", json={"rid": "a"}, headers=KEY).status_code == 200
    info = guarded.client.get("/get_server_info", headers=KEY).text
    assert "alpha" not in info
    assert "superior" not in info


def test_the_administrator_key_is_sent_like_other_keys(folder, target, draft):
    with gateway_with(folder, target, draft, admin_api_key="chef") as gateway:
        post = partial(gateway.client.post, "/abort_request", json={"abort_all": True})
        for given in ({}, {"authorization": "Bearer koch"}, {"authorization": "chef"}):
            refused = post(headers=given)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert "admin" in refused.json()["error"]["message"]
        for given in ("Bearer chef", "bearer  chef"):
            assert post(headers={"authorization": given}).status_code == 200


def test_grpc_requires_a_key(guarded):
    address = f"127.0.0.1:{guarded.grpc_port}"
    with Client(address, api_key="beta") as client:
        assert client.info().served_model_name == "counting"
        assert client.complete(A, max_tokens=3, temperature=0).token_ids == expected(A, 3)
    for key in (None, "gamma"):
        with Client(address, api_key=key) as client:
            with pytest.raises(Unauthenticated):
                client.info()
            with pytest.raises(Unauthenticated):
                client.complete(A, max_tokens=1)


def test_keys_can_come_from_the_environment(folder, target, draft, monkeypatch):
    monkeypatch.setenv("OUTRIDER_API_KEY", "one two")
    with gateway_with(folder, target, draft) as gateway:
        assert gateway.client.get("/v1/models").status_code == 401
        for key in ("one", "two"):
            assert gateway.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


# --- browsers ---


def test_only_allowed_origins_get_cors_headers(guarded, gateway):
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}

    def preflight(process, origin):
        headers = {"origin": origin, **ask}
        return process.client.options("/v1/chat/completions", headers=headers)

    allowed = preflight(guarded, "https://page.example")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in preflight(guarded, "https://other.example").headers
    assert "access-control-allow-origin" not in preflight(gateway, "https://page.example").headers
    answer = guarded.client.get("/v1/models", headers={"origin": "https://page.example", **KEY})
    assert answer.headers["access-control-allow-origin"] == "https://page.example"


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", b" " * (5 << 20)), ("/v1/models", b"")])
def test_refusals_have_cors_headers(guarded, path, body):
    """Refusals of the middleware as well, because browsers hide answers without these headers."""
    refused = guarded.client.request("POST", path, content=body, headers={"origin": "https://page.example"})
    assert refused.status_code == (413 if body else 401)
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
    assert "x-request-id" in refused.headers["access-control-expose-headers"].lower()
    assert refused.headers["x-request-id"]


def test_the_starting_gateway_answers_with_cors_headers(folder):
    gateway = Gateway(folder, [f"unix:{folder}/absent"], allowed_origins=["https://page.example"])
    origin = {"origin": "https://page.example"}
    try:
        until(lambda: answers(gateway, "/health/live") == 200, seconds=60)
        refused = gateway.client.get("/v1/models", headers=origin)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (503, "https://page.example")
        assert gateway.client.options(
            "/v1/models", headers={**origin, "access-control-request-method": "GET"}
        ).is_success
    finally:
        assert gateway.stop() == 0


# --- how many at a time ---


def test_running_requests_of_a_key_are_limited(guarded, target):
    with (
        slow(target, 0.03),
        httpx.stream(
            "POST", f"{guarded.url}/v1/completions", json={**LONG, "stream": True}, headers=KEY, timeout=30
        ) as stream,
    ):
        until(lambda: target.sessions == 1)
        response = guarded.client.post("/v1/completions", json={"prompt": "A"}, headers=KEY)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(response.headers["retry-after"]) >= 1
        other = {"authorization": "Bearer beta"}
        assert guarded.client.post("/v1/completions", json={"prompt": "A", "max_tokens": 1}, headers=other).is_success
        # At most two generations run together, over all keys.
        response = guarded.client.post("/v1/completions", json={"prompt": "A", "n": 2}, headers=other)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        assert response.headers["retry-after"]
        stream.close()
    until(lambda: target.sessions == 0)
    until(lambda: guarded.client.post("/v1/completions", json={"prompt": "A"}, headers=KEY).status_code == 200)


def test_the_server_timeout_ends_answers(folder, target, draft):
    with gateway_with(folder, target, draft, request_timeout=1.5) as gateway, slow(target, 0.05):
        for options in ({}, {"timeout": 30}):
            response = gateway.client.post("/v1/completions", json={**LONG, **options})
            assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert gateway.client.post("/v1/completions", json={"prompt": "A", "max_tokens": 1}).is_success


# --- taking leave ---


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_a_signal_ends_the_gateway_at_once(folder, target, draft, first):
    gateway = Gateway(folder, [target.address], [draft.address], drain_timeout=600).wait()
    asked = {**LONG, "stream": True}
    try:
        with slow(target, 1.0), httpx.stream("POST", f"{gateway.url}/v1/completions", json=asked, timeout=60) as answer:
            assert answer.status_code == 200
            gateway.process.send_signal(first)
            until(lambda: gateway.client.get("/health/ready").status_code == 503)  # concurrent signals have no order
            gateway.process.send_signal(signal.SIGTERM)  # a second one, as from a supervisor, does not end it
            assert gateway.client.get("/health/ready").status_code == 503
            gateway.process.send_signal(signal.SIGINT)
            assert gateway.process.wait(30) == 0
    finally:
        gateway.process.kill()
    assert gateway.stop() == 0  # and its log has no traceback
    until(lambda: target.sessions == 0)


def test_draining_finishes_running_requests_and_refuses_new_ones(folder, target, draft):
    with gateway_with(folder, target, draft, drain_timeout=20) as gateway, slow(target, 0.02):
        answers = []

        def ask():
            with httpx.stream("POST", f"{gateway.url}/v1/completions", json={**LONG, "stream": True}, timeout=30) as r:
                answers.append([line.removeprefix("data: ") for line in r.iter_lines() if line])

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: target.sessions == 1)
        gateway.process.terminate()
        until(lambda: gateway.client.get("/health/ready").status_code == 503)
        assert gateway.client.get("/health").status_code == 503
        assert gateway.client.get("/health/live").status_code == 200
        refused = gateway.client.post("/v1/completions", json={"prompt": "A"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert refused.headers["retry-after"]
        thread.join(20)
        (lines,) = answers
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == tokenizer().decode(expected(A, 300))
        try:
            assert gateway.process.wait(10) == 0
        except subprocess.TimeoutExpired:
            pytest.fail("the gateway stays without running requests")
