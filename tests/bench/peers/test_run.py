"""The comparison of peers: flags, simulated peers, and a run against `transformers` with a tiny model."""

import argparse
import json
import re

import pytest

from bench.__main__ import main
from bench.harness.report import Report
from bench.peers.base import Peer, PeerInfo, Reply
from bench.peers.run import add_rates, add_ratios, interleave, parse_arguments, peers_of, plot
from tests.support.tiny import write_model, write_tokenizer


class SimulatedPeer(Peer):
    """Answers immediately, and records the sizes of groups."""

    def __init__(self, info):
        super().__init__(info)
        self.group_sizes = []

    def running(self):
        raise AssertionError("a simulated peer is not started")

    def generate(self, texts, new):
        self.group_sizes.append(len(texts))
        return 0.5, [Reply("", new, 0.5, 1.0)] * len(texts)


def test_concurrent_requests_only_for_batching_peers(report_folder, monkeypatch):
    monkeypatch.setattr("bench.peers.run.PAUSE", 0.0)
    info = [PeerInfo("outrider bf16", "outrider", "bf16", size=9), PeerInfo("other", "x", "bf16", size=9),
             PeerInfo("sequential", "y", "bf16", size=9, batched=False)]  # fmt: skip
    peers = [SimulatedPeer(one) for one in info]
    replies, rates = interleave(peers, ["a", "b"], [["c", "d", "e"]], 11)
    assert [sorted(peer.group_sizes) for peer in peers] == [[1, 1, 3], [1, 1, 3], [1, 1]]
    report, table = Report("peers", ""), Report("peers-ratios", "")
    add_rates(report, info, replies, rates, 3, 180.0)
    assert [row["3 concurrent, tokens/s"] for row in report.rows] == [66.0, 66.0, "-"]
    assert [row["tokens/s"] for row in report.rows] == [20.0] * 3
    add_ratios(table, info, replies, rates, 3)
    (row,) = table.rows
    assert (row["other, 3"], row["sequential"], row["sequential, 3"]) == ("1.00 (1.00-1.00)", "1.00 (1.00-1.00)", "-")
    plot(report, "3 concurrent, tokens/s")
    assert (report_folder / "peers.png").stat().st_size > 1000


def test_peers_without_batching(tmp_path):
    model = write_tokenizer(write_model(tmp_path / "model"))
    args = argparse.Namespace(
        model_path=str(model), outrider=["bf16"], transformers=["plain", "lookup"], transformers_dtype="bfloat16",
        llama_model=[], openvino_model=[f"int8={tmp_path}"], openvino_python="python", vllm=None,
        gguf=None, gguf_draft=None,
    )  # fmt: skip
    alone = [peer.info.name for peer in peers_of(args, tmp_path) if not peer.info.batched]
    assert alone == ["transformers plain", "transformers lookup", "OpenVINO int8 lookup"]


def test_peers_on_a_gguf_file(tmp_path):
    file, draft = tmp_path / "large.gguf", tmp_path / "small.gguf"
    file.write_bytes(b"1234")
    draft.write_bytes(b"1")
    chosen = ["--gguf", str(file), "--gguf-draft", str(draft), "--llama-server", "python"]
    peers = list(peers_of(parse_arguments(chosen), tmp_path))
    assert [peer.info.name for peer in peers] == [
        "outrider large", "outrider large AUTO", "outrider large STANDALONE",
        "llama.cpp large", "llama.cpp large n-gram", "llama.cpp large draft model",
    ]  # fmt: skip
    assert {peer.info.size for peer in peers} == {4}


@pytest.mark.parametrize(
    ("flags", "why"),
    [(["--gguf", "nowhere.gguf"], "nowhere.gguf does not exist"), (["--gguf-draft", "x.gguf"], "give both")],
)
def test_wrong_files_are_usage_errors(capsys, flags, why):
    with pytest.raises(SystemExit):
        parse_arguments(flags)
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["nothing", "q4=/nowhere/model.gguf", "q4="])
def test_missing_models_are_usage_errors(capsys, wrong):
    with pytest.raises(SystemExit, match="2"):
        main(["peers", "--llama-model", wrong])
    assert "LABEL=PATH" in capsys.readouterr().err


def test_missing_programs_are_usage_errors(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["peers", "--llama-server", "/nowhere/llama-server", "--llama-model", f"this={__file__}"])
    assert "--llama-server" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_beside_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.peers.run.PAUSE", 0.0)
    model = tmp_path / "model"
    write_tokenizer(write_model(model, seed=3))
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"category": "x", "prompt": text}) + "\n" for text in ("one", "two")))
    flags = ["--model-path", str(model), "--prompts", str(file), "--new-tokens", "12", "--concurrency", "2"]
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
    assert ratio["transformers plain, 2"] == rows["transformers plain"]["2 concurrent, tokens/s"] == "-"
    assert rows["outrider bf16"]["2 concurrent, tokens/s"] > 0


@pytest.mark.parametrize(
    "flags", [["--transformers", "off"], ["--transformers", "assisted:nowhere"], ["--llama-model", "a=b"]]
)
def test_invalid_peers_are_usage_errors(flags, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(flags)
    assert flags[1] in capsys.readouterr().err


def test_a_single_new_token_is_a_usage_error(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--new-tokens", "1"])
    assert "2 or more" in capsys.readouterr().err
