"""The comparison with others: figures from replies, and a whole run against `transformers` on a tiny model."""

import argparse
import json
import re

import pytest

from bench.__main__ import main
from bench.harness.report import Report
from bench.peers.base import PeerInfo, Peer, Reply
from bench.peers.figures import median_and_quartiles, ratios, equal_texts
from bench.peers.run import parse_arguments, plot, add_rates, add_ratios, interleave, peers_of
from bench.peers.servers import Server
from tests.support.bench.server import STEP, in_a_thread
from tests.support.tiny import write_model, write_tokenizer


def reply(text, tokens, first, seconds):
    return Reply(text, tokens, first, seconds)


def test_rates_count_what_comes_behind_the_first_token():
    assert reply("", 11, 1.0, 2.0).rate == pytest.approx(10.0)
    ours = [reply("a", 11, 1.0, 2.0), reply("b", 1, 1.0, 1.0), reply("c", 5, 0.0, 1.0)]
    theirs = [reply("a", 11, 0.0, 2.0), reply("b", 9, 0.0, 1.0), reply("c", 5, 0.0, 0.5)]
    assert ratios(ours, theirs) == pytest.approx([2.0, 0.5])
    assert median_and_quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert median_and_quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0, 4.0)


def test_texts_are_compared_within_a_family_and_a_format():
    peers = [PeerInfo("a", "x", "bf16"), PeerInfo("b", "x", "bf16", "n-gram"), PeerInfo("c", "x", "int8", "n-gram")]
    said = {
        name: [reply(text, 2, 0, 1) for text in texts] for name, texts in zip("abc", ("pq", "pr", "pq"), strict=True)
    }
    assert equal_texts(peers, said) == {"b": "1/2"}


def test_tokens_without_text_take_time(tmp_path):
    with in_a_thread() as url:
        server = Server(PeerInfo("a", "x", "bf16"), [], tmp_path)
        server._url = url
        _, replies = server.generate(["good", "tail"], 9)
    good, tail = replies
    assert tail.seconds - tail.first >= good.seconds - good.first + STEP
    assert tail.rate < good.rate


class Fake(Peer):
    """Answers at once, and remembers how many it was asked together."""

    def __init__(self, info):
        super().__init__(info)
        self.asked = []

    def running(self):
        raise AssertionError("it runs")

    def generate(self, texts, new):
        self.asked.append(len(texts))
        return 0.5, [reply("", new, 0.5, 1.0)] * len(texts)


def test_several_at_once_are_told_of_those_that_answer_them_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.peers.run._REST", 0.0)
    monkeypatch.setattr("bench.harness.report._chosen", tmp_path)
    info = [PeerInfo("outrider bf16", "outrider", "bf16", size=9), PeerInfo("other", "x", "bf16", size=9),
             PeerInfo("one by one", "y", "bf16", size=9, batched=False)]  # fmt: skip
    peers = [Fake(one) for one in info]
    replies, together = interleave(peers, ["a", "b"], [["c", "d", "e"]], 11)
    assert [sorted(peer.asked) for peer in peers] == [[1, 1, 3], [1, 1, 3], [1, 1]]
    report, table = Report("peers", ""), Report("peers-ratios", "")
    add_rates(report, info, replies, together, 3, 180.0)
    assert [row["3 at once, tokens/s"] for row in report.rows] == [66.0, 66.0, "-"]
    assert [row["tokens/s"] for row in report.rows] == [20.0] * 3
    add_ratios(table, info, replies, together, 3)
    (row,) = table.rows
    assert (row["other, 3"], row["one by one"], row["one by one, 3"]) == ("1.00 (1.00-1.00)", "1.00 (1.00-1.00)", "-")
    plot(report, "3 at once, tokens/s")
    assert (tmp_path / "peers.png").stat().st_size > 1000


def test_who_answers_one_after_the_other(tmp_path):
    model = write_tokenizer(write_model(tmp_path / "model"))
    args = argparse.Namespace(
        model_path=str(model), outrider=["bf16"], transformers=["plain", "lookup"], transformers_dtype="bfloat16",
        llama_model=[], openvino_model=[f"int8={tmp_path}"], openvino_python="python", vllm=None,
    )  # fmt: skip
    alone = [peer.info.name for peer in peers_of(args, tmp_path) if not peer.info.batched]
    assert alone == ["transformers plain", "transformers lookup", "OpenVINO int8 lookup"]


@pytest.mark.parametrize("wrong", ["nothing", "q4=/nowhere/model.gguf", "q4="])
def test_a_model_that_is_not_there_is_refused(capsys, wrong):
    with pytest.raises(SystemExit, match="2"):
        main(["peers", "--llama-model", wrong])
    assert "LABEL=PATH" in capsys.readouterr().err


def test_a_program_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["peers", "--llama-server", "/nowhere/llama-server", "--llama-model", f"this={__file__}"])
    assert "--llama-server" in capsys.readouterr().err


def test_a_run_beside_transformers(tmp_path):
    model = tmp_path / "model"
    write_tokenizer(write_model(model, seed=3))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"category": "x", "prompt": text}) + "\n" for text in ("one", "two")))
    flags = ["--model-path", str(model), "--prompts", str(file), "--new-tokens", "12", "--together", "2"]
    flags += ["--rounds", "1", "--outrider", "bf16", "--transformers", "plain", "lookup"]
    assert main(["peers", "--output", str(tmp_path / "out"), *flags]) == 0
    rows = {row["peer"]: row for row in json.loads((tmp_path / "out" / "peers.json").read_text())["rows"]}
    assert list(rows) == ["outrider bf16", "transformers plain", "transformers lookup"]
    assert all(row["tokens/s"] > 0 and row["floor, tokens/s"] > 0 for row in rows.values())
    assert rows["transformers lookup"]["same text"] in ("0/2", "1/2", "2/2")
    (ratio,) = json.loads((tmp_path / "out" / "peers-ratios.json").read_text())["rows"]
    assert ratio["ours"] == "outrider bf16"
    assert ratio["outrider bf16"] == ratio["outrider bf16, 2"] == "1.00 (1.00-1.00)"
    middle, low, high = map(float, re.findall(r"\d+\.\d+", ratio["transformers plain"]))
    assert 0 < low <= middle <= high
    assert ratio["transformers plain, 2"] == rows["transformers plain"]["2 at once, tokens/s"] == "-"
    assert rows["outrider bf16"]["2 at once, tokens/s"] > 0


@pytest.mark.parametrize(
    "flags", [["--transformers", "off"], ["--transformers", "assisted:nowhere"], ["--llama-model", "a=b"]]
)
def test_what_cannot_be_started_is_refused_before_anything_is(flags, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(flags)
    assert flags[1] in capsys.readouterr().err


def test_a_single_token_has_no_rate(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--new-tokens", "1"])
    assert "2 or more" in capsys.readouterr().err
