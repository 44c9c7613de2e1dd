"""Answers that end early: by a timeout, and when the gateway stops."""

import json
import signal
import subprocess
import threading

import httpx
import pytest

from tests.support.gateway.admission import LONG, A, gateway_with, slow
from tests.support.gateway.engines import expected, tokenizer
from tests.support.gateway.services import Gateway, until


def test_the_server_timeout_ends_answers(folder, target, draft):
    with gateway_with(folder, target, draft, request_timeout=1.5) as gateway, slow(target, 0.05):
        for options in ({}, {"timeout": 30}):
            response = gateway.client.post("/v1/completions", json={**LONG, **options})
            assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert gateway.client.post("/v1/completions", json={"prompt": "A", "max_tokens": 1}).is_success


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
    with gateway_with(folder, target, draft, drain_timeout=200) as gateway, slow(target, 0.02):
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
        thread.join(60)
        (lines,) = answers
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == tokenizer().decode(expected(A, 300))
        try:
            assert gateway.process.wait(60) == 0
        except subprocess.TimeoutExpired:
            pytest.fail("the gateway stays without running requests")
