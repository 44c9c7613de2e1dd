"""The load generator against a real server on this machine that also misbehaves."""

import json

import aiohttp
import pytest

from bench.__main__ import main
from bench.harness.prompts import Prompt
from bench.serve.client import Client, Events, Target, root_of
from bench.serve.load import Plan, run
from tests.support.bench.server import ACCEPTED, DRAFTED, STEP, TOKENS, WORDS, in_a_thread, running


def prompts(*texts):
    return [Prompt("x", (text,)) for text in texts]


async def test_a_good_answer_is_timed_and_counted():
    async with running() as (server, url):
        (outcome,) = await run(Target(url, "chat", "tiny"), prompts("one two three"), Plan())
    assert outcome.error == ""
    assert outcome.text == "".join(WORDS)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.learning_counters) == (3, TOKENS, True)
    assert (outcome.drafted, outcome.accepted) == (DRAFTED, ACCEPTED)
    assert len(outcome.pieces) == len(WORDS), "the opening chunk has no text"
    assert outcome.ttft >= STEP
    assert outcome.tpot >= STEP * (len(WORDS) - 1) / TOKENS
    assert outcome.due <= outcome.sent < outcome.pieces[0] < outcome.pieces[-1] <= outcome.ended
    assert server.requests[0]["model"] == "tiny"
    assert server.requests[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_every_misbehaviour_has_its_name(endpoint):
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
    assert (bare.error, bare.learning_counters, bare.output_tokens) == ("", False, len(WORDS))
    assert (llama.error, llama.learning_counters, llama.output_tokens, llama.prompt_tokens) == ("", True, TOKENS, 7)
    assert (llama.drafted, llama.accepted) == (DRAFTED, ACCEPTED)


async def test_whole_answers():
    async with running() as (_, url):
        (outcome,) = await run(Target(url, "chat", "tiny", {"stream": False}), prompts("good"), Plan())
    assert (outcome.error, outcome.output_tokens, outcome.ttft) == ("", TOKENS, None)
    assert outcome.latency > 0


async def test_tokens_without_text_are_timed():
    async with running() as (_, url):
        tail, tool = await run(Target(url, "chat", "tiny"), prompts("tail", "tool"), Plan())
    assert (tail.error, len(tail.pieces)) == ("", len(WORDS))
    assert tail.latency >= tail.pieces[-1] - tail.due + STEP
    assert tail.tpot == (tail.latency - tail.ttft) / (TOKENS - 1)
    assert (tool.error, tool.text, len(tool.pieces)) == ("", "", len(WORDS))
    assert tool.ttft >= STEP


async def test_later_turns_have_no_thoughts_in_them():
    async with running() as (server, url):
        first, _ = await run(Target(url, "chat", "tiny"), [Prompt("x", ("thoughts", "again"))], Plan())
    assert first.text == "".join("hm" + word for word in WORDS)
    assert server.requests[1]["messages"][1]["content"] == "".join(WORDS)


async def test_fields_that_a_server_refuses_are_left_out():
    body = {"ignore_eos": None, "seed": None, "stream_options": None, "stop": "x"}
    async with running() as (server, url):
        (outcome,) = await run(Target(url, "chat", "tiny", body), prompts("bare"), Plan())
    assert outcome.error == ""
    assert server.requests[0].keys() == {"model", "stream", "messages", "stop"}


async def test_what_cannot_be_sent_is_one_failed_request():
    async with running() as (server, url):
        outcomes = await run(Target(url, "chat", "tiny"), prompts("half of a pair: \ud83d", "good"), Plan())
    assert [outcome.error for outcome in outcomes] == ["cannot be sent", ""]
    assert "surrogates" in outcomes[0].detail
    assert len(server.requests) == 1


async def test_no_server():
    (outcome,) = await run(Target("http://127.0.0.1:9", "chat", "tiny"), prompts("x"), Plan())
    assert outcome.error == "no connection"


async def test_a_server_that_takes_no_connection(monkeypatch):
    """Its queue is full, as under more load than it can bear."""

    async def wait(*_):
        raise aiohttp.ConnectionTimeoutError

    monkeypatch.setattr(Client, "_ask", wait)
    (outcome,) = await run(Target("http://127.0.0.1:9", "chat", "tiny"), prompts("x"), Plan())
    assert (outcome.error, outcome.detail) == ("no connection", "none in 30 s")


async def test_as_many_at_a_time_as_asked_for(monkeypatch):
    monkeypatch.setattr("tests.support.bench.server.STEP", 0.05)  # all are there before the first one is answered
    async with running() as (server, url):
        await run(Target(url, "chat", "tiny"), prompts(*"abcdefghij"), Plan(concurrency=3))
        assert server.most == 3
        server.most = 0
        await run(Target(url, "chat", "tiny"), prompts(*"abcdef"), Plan(concurrency=None, rate=1000.0))
        assert server.most == 6


async def test_arrivals_wait_for_nobody_and_waiting_counts(monkeypatch):
    """Three requests come at once and one is served at a time: what the others wait is part of their latency."""
    monkeypatch.setattr("tests.support.bench.server.STEP", 0.05)  # all are sent before the first one is answered
    async with running() as (_, url):
        free = await run(Target(url, "chat", "tiny"), prompts(*"abc"), Plan(None, rate=1000.0))
        held = await run(Target(url, "chat", "tiny"), prompts(*"abc"), Plan(1, rate=1000.0))
    assert free[2].sent < free[0].ended
    assert held[2].sent >= held[1].ended
    assert held[2].ttft > held[1].ended - held[2].due


async def test_a_conversation_goes_on_with_its_answers_and_ends_where_it_fails():
    async with running() as (server, url):
        talk = [Prompt("x", ("one", "two", "three")), Prompt("x", ("one", "500", "never"))]
        outcomes = await run(Target(url, "chat", "tiny"), talk, Plan(seed=40))
    assert [(o.turn, o.error) for o in outcomes] == [(0, ""), (1, ""), (2, ""), (0, ""), (1, "HTTP 500")]
    said = server.requests[2]["messages"]
    assert [m["role"] for m in said] == ["user", "assistant", "user", "assistant", "user"]
    assert said[1]["content"] == "".join(WORDS)
    assert [r["seed"] for r in server.requests] == [40, 40, 40, 41, 41]


async def test_answers_have_the_lengths_of_the_data():
    async with running() as (server, url):
        await run(Target(url, "chat", "tiny", {"max_tokens": 9}), [Prompt("x", ("a", "b", "c"), (3, 4))], Plan())
    assert [body["max_tokens"] for body in server.requests] == [3, 4, 9]


def test_events_are_cut_anywhere():
    raw = ': ping\r\ndata: {"a": "é"}\r\n\r\nevent: x\ndata:[DONE]\n\n'.encode()
    for cut in range(len(raw)):
        events = Events()
        assert events.feed(raw[:cut]) + events.feed(raw[cut:]) == ['{"a": "é"}'.encode(), b"[DONE]"]
    events = Events()
    assert events.feed(b"data: [DONE]") + events.end() == [b"[DONE]"], "the last line may lack its end"


def test_addresses_with_and_without_the_version():
    assert {root_of(u) for u in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/")} == {"http://a:1"}


@pytest.fixture
def address():
    with in_a_thread() as url:
        yield url


def test_the_program_from_flags_to_files(address, tmp_path, capsys):
    rows = [{"category": c, "turns": [t, "again"]} for c, t in (("a", "good"), ("a", "fine"), ("b", "429"), ("b", "x"))]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--base-url", f"{address}/v1", "--prompts", str(file), "--concurrency", "2", "--turns", "2"]
    flags += [
        "--num-prompts",
        "4",
        "--json",
        str(tmp_path / "x.json"),
        "--plot",
        str(tmp_path / "x.png"),
        "--goodput",
        "ttft:5000",
    ]
    assert main(["serve", *flags, "--api-key", "secret"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "6 / 1",
        "HTTP 429",
        "no [/red]: 429",
        "accept length 2.00",
        "by position 100.0% (/metrics",
        "goodput",
    ):
        assert words in shown
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["parameters"]["model"] == "tiny"
    assert "secret" not in json.dumps(content)
    assert content["summary"]["output_tokens"] == 6 * TOKENS
    assert content["summary"]["speculation"]["accept_length"] == 2.0
    assert content["server_speculation"]["per_position"] == [1.0, 0.0, 0.0]
    assert content["categories"]["b"]["failed"] == 1
    assert len(content["requests"]) == 7
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_synthetic_prompts_at_a_rate(address, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("bench.harness.report._chosen", None)
    flags = ["--base-url", address, "--endpoint", "completions", "--input-len", "12", "--output-len", "5"]
    assert main(["serve", *flags, "--num-prompts", "4", "--request-rate", "100", "--warmup", "0"]) == 0
    assert "48 / 40" in capsys.readouterr().out
    assert main(["serve", *flags, "--num-prompts", "1", "--output", str(tmp_path)]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"serve.json", "serve.png"}


def test_whole_answers_have_a_latency_alone(address, tmp_path, capsys):
    flags = ["--base-url", address, "--num-prompts", "2", "--no-stream"]
    for stream in (["--no-stream"], ["--extra-body", '{"stream": null}']):
        with pytest.raises(SystemExit):
            main(["serve", *flags[:-1], *stream, "--goodput", "e2el:9", "tpot:9"])
        assert "no time per output token" in capsys.readouterr().err
    assert main(["serve", *flags, "--goodput", "e2el:5000", "--json", str(tmp_path / "x.json")]) == 0
    content = json.loads((tmp_path / "x.json").read_text())
    assert (content["summary"]["tpot"], content["summary"]["itl"]) == (None, None)
    assert {request["tpot"] for request in content["requests"]} == {None}


def test_even_arrivals_and_answers_that_may_take_for_ever(address, capsys):
    flags = ["--num-prompts", "3", "--request-rate", "100", "--burstiness", "inf", "--timeout", "inf"]
    assert main(["serve", "--base-url", address, *flags]) == 0
    assert "3 / 0" in capsys.readouterr().out


def test_a_rate_without_limit_is_null_in_json(address, tmp_path):
    def refused(name):
        raise AssertionError(f"{name} is no JSON")

    flags = ["--base-url", address, "--num-prompts", "2", "--request-rate", "inf", "--json", str(tmp_path / "x.json")]
    assert main(["serve", *flags]) == 0
    content = json.loads((tmp_path / "x.json").read_text(), parse_constant=refused)
    assert content["parameters"]["request_rate"] is None


def test_what_cannot_be_written_is_refused_before_anything_is_asked(address, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    wrong = (["--json", str(tmp_path)], ["--plot", str(file / "x.png")], ["--plot", str(tmp_path / "x.xyz")])
    for flags in wrong:
        with pytest.raises(SystemExit, match="2"):
            main(["serve", "--base-url", address, *flags])
        assert flags[1] in capsys.readouterr().err
    assert main(["serve", "--base-url", address, "--output", str(file)]) == 2
    assert "--output" in capsys.readouterr().err


def test_mistakes_are_told(address, tmp_path, capsys):
    assert main(["serve", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "is it up?" in capsys.readouterr().err
    for key, words in (("wrong", "GET /v1/models: HTTP 401: no such key"), ("two\nlines", "headers")):
        assert main(["serve", "--base-url", address, "--api-key", key]) == 1
        said = capsys.readouterr().err
        assert words in said
        assert "is it up?" not in said
    wrong = (["--prompts", str(tmp_path / "none")], ["--goodput", "speed:1"], ["--request-rate", "0"],
             ["--num-prompts", "0"], ["--extra-body", "[1]"], ["--extra-body", "{"])  # fmt: skip
    for flags in wrong:
        with pytest.raises(SystemExit) as caught:
            main(["serve", "--base-url", address, *flags])
        assert caught.value.code == 2
    told = {
        "--base-url localhost:30000": "neither http://",
        "--header x": "'x' is not NAME:VALUE",
        "--turns 2": "a file (--prompts)",
        "--num-prompts x": "'x' is no whole number",
        "--seed -1": "-1 is less than 0",
        "--timeout soon": "'soon' is no number",
        "--extra-body {": "{ is no JSON: Expecting",
    }
    capsys.readouterr()
    for flag, words in told.items():
        with pytest.raises(SystemExit):
            main(["serve", "--base-url", address, *flag.split()])
        assert words in capsys.readouterr().err
    talks = tmp_path / "prompts.jsonl"
    talks.write_text('{"prompt": "x"}')
    with pytest.raises(SystemExit):
        main(["serve", "--base-url", address, "--prompts", str(talks), "--reply-lengths"])
    assert "without answers" in capsys.readouterr().err
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "500"}')
    assert main(["serve", "--base-url", address, "--prompts", str(bad), "--warmup", "0"]) == 1
    assert "HTTP 500" in capsys.readouterr().out
