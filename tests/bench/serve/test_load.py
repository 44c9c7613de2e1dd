"""The client and the schedules of a load, against a simulated server with failures."""

import math

import aiohttp
import numpy as np
import pytest

from bench.harness.prompts import Prompt
from bench.serve.client import Events, Target, root_of
from bench.serve.load import Plan, arrivals, run
from tests.support.bench.server import ACCEPTED, DRAFTED, STEP, TOKENS, WORDS, running


def prompts(*texts):
    return [Prompt("x", (text,)) for text in texts]


async def test_a_good_answer_is_timed_and_counted():
    async with running() as (server, url):
        (outcome,) = await run(Target(url, "chat", "tiny"), prompts("one two three"), Plan())
    assert outcome.error == ""
    assert outcome.text == "".join(WORDS)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.counted) == (3, TOKENS, True)
    assert (outcome.drafted, outcome.accepted) == (DRAFTED, ACCEPTED)
    assert len(outcome.pieces) == len(WORDS), "the opening chunk has no text"
    assert outcome.ttft >= STEP
    assert outcome.tpot >= STEP * (len(WORDS) - 1) / TOKENS
    assert outcome.due <= outcome.sent < outcome.pieces[0] < outcome.pieces[-1] <= outcome.ended
    assert server.requests[0]["model"] == "tiny"
    assert server.requests[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_every_failure_has_a_kind(endpoint):
    kinds = {
        "429": "HTTP 429",
        "500": "HTTP 500",
        "broken": "broken stream",
        "short": "broken stream",
        "error": "error in the stream",
        "garbage": "no JSON",
        "list": "no JSON",
        "empty": "empty answer",
        "odd": "chunk of an unknown form",
        "cut": "cut off",
        "good": "",
    }
    async with running() as (_, url):
        outcomes = await run(Target(url, endpoint, "tiny"), prompts(*kinds), Plan(concurrency=4))
    found = {text: outcome.error for text, outcome in zip(kinds, outcomes, strict=True)}
    assert found == kinds
    details = dict(zip(kinds, (outcome.detail for outcome in outcomes), strict=True))
    assert details["429"] == "no [/red]: 429"
    assert details["error"] == "out of pages"


async def test_an_answer_that_does_not_end():
    async with running() as (_, url):
        (outcome,) = await run(Target(url, "chat", "tiny", timeout=0.4), prompts("slow"), Plan())
    assert (outcome.error, outcome.detail) == ("timeout", "no whole answer in 0.4 s")
    assert outcome.ended >= 0.4


async def test_answers_without_usage():
    async with running() as (_, url):
        bare, llama = await run(Target(url, "chat", "tiny"), prompts("bare", "llama"), Plan())
    assert (bare.error, bare.counted, bare.output_tokens) == ("", False, len(WORDS))
    assert (llama.error, llama.counted, llama.output_tokens, llama.prompt_tokens) == ("", True, TOKENS, 7)
    assert (llama.drafted, llama.accepted) == (DRAFTED, ACCEPTED)


async def test_answers_without_streaming():
    async with running() as (_, url):
        (outcome,) = await run(Target(url, "chat", "tiny", {"stream": False}), prompts("good"), Plan())
    assert (outcome.error, outcome.output_tokens, outcome.ttft) == ("", TOKENS, None)
    assert outcome.latency > 0


async def test_latency_includes_tokens_without_text():
    async with running() as (_, url):
        tail, tool = await run(Target(url, "chat", "tiny"), prompts("tail", "tool"), Plan())
    assert (tail.error, len(tail.pieces)) == ("", len(WORDS))
    assert tail.latency >= tail.pieces[-1] - tail.due + STEP
    assert tail.tpot == (tail.latency - tail.ttft) / (TOKENS - 1)
    assert (tool.error, tool.text, len(tool.pieces)) == ("", "", len(WORDS))
    assert tool.ttft >= STEP


async def test_later_turns_contain_no_reasoning():
    async with running() as (server, url):
        first, _ = await run(Target(url, "chat", "tiny"), [Prompt("x", ("thoughts", "again"))], Plan())
    assert first.text == "".join("hm" + word for word in WORDS)
    assert server.requests[1]["messages"][1]["content"] == "".join(WORDS)


async def test_null_removes_fields_of_requests():
    body = {"ignore_eos": None, "seed": None, "stream_options": None, "stop": "x"}
    async with running() as (server, url):
        (outcome,) = await run(Target(url, "chat", "tiny", body), prompts("bare"), Plan())
    assert outcome.error == ""
    assert server.requests[0].keys() == {"model", "stream", "messages", "stop"}


async def test_an_unserializable_request_fails_alone():
    async with running() as (server, url):
        outcomes = await run(Target(url, "chat", "tiny"), prompts("half of a pair: \ud83d", "good"), Plan())
    assert [outcome.error for outcome in outcomes] == ["cannot be sent", ""]
    assert "surrogates" in outcomes[0].detail
    assert len(server.requests) == 1


async def test_no_server():
    (outcome,) = await run(Target("http://127.0.0.1:9", "chat", "tiny"), prompts("x"), Plan())
    assert outcome.error == "no connection"


async def test_connection_timeout(monkeypatch):
    """An overloaded server, whose queue of connections is full."""

    def post(*_, **__):
        raise aiohttp.ConnectionTimeoutError

    monkeypatch.setattr(aiohttp.ClientSession, "post", post)
    (outcome,) = await run(Target("http://127.0.0.1:9", "chat", "tiny"), prompts("x"), Plan())
    assert (outcome.error, outcome.detail) == ("no connection", "none in 30 s")


async def test_concurrency_limit(monkeypatch):
    monkeypatch.setattr("tests.support.bench.server.STEP", 0.05)  # all requests arrive before the first answer ends
    async with running() as (server, url):
        await run(Target(url, "chat", "tiny"), prompts(*"abcdefghij"), Plan(concurrency=3))
        assert server.most == 3
        server.most = 0
        await run(Target(url, "chat", "tiny"), prompts(*"abcdef"), Plan(concurrency=None, rate=1000.0))
        assert server.most == 6


async def test_open_loop_latency_includes_waiting(monkeypatch):
    """With concurrency 1, the latency of three simultaneous requests includes the time that they wait."""
    monkeypatch.setattr("tests.support.bench.server.STEP", 0.05)  # all requests are sent before the first answer ends
    async with running() as (_, url):
        free = await run(Target(url, "chat", "tiny"), prompts(*"abc"), Plan(None, rate=1000.0))
        held = await run(Target(url, "chat", "tiny"), prompts(*"abc"), Plan(1, rate=1000.0))
    assert free[2].sent < free[0].ended
    assert held[2].sent >= held[1].ended
    assert held[2].ttft > held[1].ended - held[2].due


async def test_conversations_contain_answers_and_end_at_a_failure():
    async with running() as (server, url):
        talk = [Prompt("x", ("one", "two", "three")), Prompt("x", ("one", "500", "never"))]
        outcomes = await run(Target(url, "chat", "tiny"), talk, Plan(seed=40))
    assert [(o.turn, o.error) for o in outcomes] == [(0, ""), (1, ""), (2, ""), (0, ""), (1, "HTTP 500")]
    messages = server.requests[2]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[1]["content"] == "".join(WORDS)
    assert [r["seed"] for r in server.requests] == [40, 40, 40, 41, 41]


async def test_reply_lengths_set_max_tokens():
    async with running() as (server, url):
        await run(Target(url, "chat", "tiny", {"max_tokens": 9}), [Prompt("x", ("a", "b", "c"), (3, 4))], Plan())
    assert [body["max_tokens"] for body in server.requests] == [3, 4, 9]


def test_events_split_anywhere():
    raw = ': ping\r\ndata: {"a": "é"}\r\n\r\nevent: x\ndata:[DONE]\n\n'.encode()
    for cut in range(len(raw)):
        events = Events()
        assert events.feed(raw[:cut]) + events.feed(raw[cut:]) == ['{"a": "é"}'.encode(), b"[DONE]"]
    events = Events()
    assert events.feed(b"data: [DONE]") + events.end() == [b"[DONE]"], "the last line may lack its end"


def test_urls_with_and_without_v1():
    assert {root_of(u) for u in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/")} == {"http://a:1"}


def test_arrivals_keep_their_rate_and_their_burstiness():
    times = arrivals(2001, 50.0, 1.0, seed=3)
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(40.0)
    assert times == sorted(times)
    assert times == arrivals(2001, 50.0, 1.0, seed=3)
    variation = {b: np.diff(arrivals(2001, 50.0, b, 3)).std() * 50 for b in (0.25, 1.0, 100.0)}
    assert variation[1.0] == pytest.approx(1.0, abs=0.1), "gaps of Poisson arrivals vary as much as they last"
    assert variation[0.25] == pytest.approx(2.0, abs=0.3)
    assert variation[100.0] == pytest.approx(0.1, abs=0.02)
    assert arrivals(5, 4.0, math.inf, 0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert arrivals(1, 5.0, 1.0, 0) == [0.0]
    assert arrivals(0, 5.0, 1.0, 0) == []
