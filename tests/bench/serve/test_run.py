"""The program `bench serve`, from flags to files, against a simulated server."""

import json

import pytest

from bench.__main__ import main
from tests.support.bench.server import TOKENS, in_a_thread


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


def test_synthetic_prompts_at_a_rate(address, capsys, tmp_path):
    flags = ["--base-url", address, "--endpoint", "completions", "--input-len", "12", "--output-len", "5"]
    assert main(["serve", *flags, "--num-prompts", "4", "--request-rate", "100", "--warmup", "0"]) == 0
    assert "48 / 40" in capsys.readouterr().out
    assert main(["serve", *flags, "--num-prompts", "1", "--output", str(tmp_path)]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"serve.json", "serve.png"}


def test_answers_without_streaming_have_only_a_latency(address, tmp_path, capsys):
    flags = ["--base-url", address, "--num-prompts", "2", "--no-stream"]
    for stream in (["--no-stream"], ["--extra-body", '{"stream": null}']):
        with pytest.raises(SystemExit):
            main(["serve", *flags[:-1], *stream, "--goodput", "e2el:9", "tpot:9"])
        assert "no time per output token" in capsys.readouterr().err
    assert main(["serve", *flags, "--goodput", "e2el:5000", "--json", str(tmp_path / "x.json")]) == 0
    content = json.loads((tmp_path / "x.json").read_text())
    assert (content["summary"]["tpot"], content["summary"]["itl"]) == (None, None)
    assert {request["tpot"] for request in content["requests"]} == {None}


def test_constant_arrivals_and_infinite_timeout(address, capsys):
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


def test_unwritable_files_are_usage_errors(address, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    wrong = (["--json", str(tmp_path)], ["--plot", str(file / "x.png")], ["--plot", str(tmp_path / "x.xyz")])
    for flags in wrong:
        with pytest.raises(SystemExit, match="2"):
            main(["serve", "--base-url", address, *flags])
        assert flags[1] in capsys.readouterr().err
    assert main(["serve", "--base-url", address, "--output", str(file)]) == 2
    assert "--output" in capsys.readouterr().err


def test_errors_about_servers_flags_and_files(address, tmp_path, capsys):
    assert main(["serve", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "is it up?" in capsys.readouterr().err
    for key, words in (("wrong", "GET /v1/models: HTTP 401: no such key"), ("two\nlines", "headers")):
        assert main(["serve", "--base-url", address, "--api-key", key]) == 1
        errors = capsys.readouterr().err
        assert words in errors
        assert "is it up?" not in errors
    wrong = (["--prompts", str(tmp_path / "none")], ["--goodput", "speed:1"], ["--request-rate", "0"],
             ["--num-prompts", "0"], ["--extra-body", "[1]"], ["--extra-body", "{"])  # fmt: skip
    for flags in wrong:
        with pytest.raises(SystemExit) as caught:
            main(["serve", "--base-url", address, *flags])
        assert caught.value.code == 2
    messages = {
        "--base-url localhost:30000": "neither http://",
        "--header x": "'x' is not NAME:VALUE",
        "--turns 2": "a file (--prompts)",
        "--num-prompts x": "'x' is no whole number",
        "--seed -1": "-1 is less than 0",
        "--timeout soon": "'soon' is no number",
        "--extra-body {": "{ is no JSON: Expecting",
    }
    capsys.readouterr()
    for flag, words in messages.items():
        with pytest.raises(SystemExit):
            main(["serve", "--base-url", address, *flag.split()])
        assert words in capsys.readouterr().err
    conversations = tmp_path / "prompts.jsonl"
    conversations.write_text('{"prompt": "x"}')
    with pytest.raises(SystemExit):
        main(["serve", "--base-url", address, "--prompts", str(conversations), "--reply-lengths"])
    assert "without answers" in capsys.readouterr().err
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "500"}')
    assert main(["serve", "--base-url", address, "--prompts", str(bad), "--warmup", "0"]) == 1
    assert "HTTP 500" in capsys.readouterr().out
