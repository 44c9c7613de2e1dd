"""The comparison with others: figures from replies, and a whole run against `transformers` on a tiny model."""

import json
import re

import pytest

from bench.__main__ import main
from bench.peers.base import Facts, Reply
from bench.peers.figures import median_and_quartiles, ratios, same_texts
from tests.tiny import write_model, write_tokenizer


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
    peers = [Facts("a", "x", "bf16"), Facts("b", "x", "bf16", "n-gram"), Facts("c", "x", "int8", "n-gram")]
    said = {
        name: [reply(text, 2, 0, 1) for text in texts] for name, texts in zip("abc", ("pq", "pr", "pq"), strict=True)
    }
    assert same_texts(peers, said) == {"b": "1/2"}


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
    for name in ("transformers plain", "transformers plain, 2"):
        middle, low, high = map(float, re.findall(r"\d+\.\d+", ratio[name]))
        assert 0 < low <= middle <= high
