"""Prompts in published formats, and synthetic prompts."""

import json
from pathlib import Path

import pytest

from bench.end_to_end import system
from bench.harness.prompts import Prompt, first_per_category, read_prompts, sample, synthetic
from bench.services import quality


def test_spec_bench_rows(tmp_path):
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]},
        {"question_id": 541, "category": "rag", "turns": ["Who won?"]},
        {"prompt": "One only."},
    ]
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_prompts(file) == [
        Prompt("writing", ("Compose a post.", "Rewrite it.")),
        Prompt("rag", ("Who won?",)),
        Prompt("all", ("One only.",)),
    ]


def test_share_gpt_conversations(tmp_path):
    rows = [
        {"id": "a_0", "conversations": [
            {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello you!"},
            {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "x" * 400}, {"from": "human", "value": "Bye"},
        ]},
        {"id": "a_1", "conversations": [{"from": "gpt", "value": "On with the story."}]},
        {"id": "a_2", "conversations": []},
    ]  # fmt: skip
    file = tmp_path / "sg.json"
    file.write_text(json.dumps(rows, indent=1))
    assert read_prompts(file) == [Prompt("all", ("Hi", "Why?"), (2, 100))], "the last turn has no answer"


def test_conversations_with_roles(tmp_path):
    messages = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello you!"), ("user", "Bye")]
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"conversations": [{"role": role, "content": text} for role, text in messages]}))
    assert read_prompts(file) == [Prompt("all", ("Hi",), (2,))]


def test_only_newlines_end_json_lines(tmp_path, monkeypatch):
    """A file may have a byte order mark and CRLF; texts may contain other line separators."""
    texts = ["first\u2028second", "nel\x85", "ok"]
    file = tmp_path / "x.jsonl"
    rows = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    assert [prompt.turns for prompt in read_prompts(file)] == [(text,) for text in texts]
    monkeypatch.setattr(system, "BUNDLED_PROMPTS", file)
    assert system.prompts(2) == texts[:2]
    rendered_texts = []

    def rendered(_, texts):
        rendered_texts.extend(texts)
        raise SystemExit

    monkeypatch.setattr(quality, "rendered", rendered)
    monkeypatch.setattr(quality.checkpoint, "resolve", Path)
    with pytest.raises(SystemExit):
        quality.main(["--model", str(tmp_path), "--prompts", str(file), "--count", "2"])
    assert rendered_texts == texts[:2]


def test_invalid_json_is_reported_with_its_row(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "good"}\n\n{"prompt": "o')
    with pytest.raises(ValueError, match=r"x\.jsonl, row 3 is no JSON"):
        read_prompts(file)
    file.write_text('[{"prompt": "good"},')
    with pytest.raises(ValueError, match=r"x\.jsonl is no JSON"):
        read_prompts(file)


@pytest.mark.parametrize("row", [
    {"text": "x"}, {"turns": [{"role": "user"}]}, {"turns": "Hello"}, {"turns": None}, "turns", ["turns"], None,
    {"prompt": 7}, {"conversations": None}, {"conversations": ["Hi"]}, {"conversations": [{"from": "human"}]},
    {"conversations": [{"value": "Hi"}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": None}]},
])  # fmt: skip
def test_rows_of_unknown_form_are_reported(tmp_path, row):
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"prompt": "good"}) + "\n" + json.dumps(row))
    with pytest.raises(ValueError, match=r"x\.jsonl, row 2"):
        read_prompts(file)


def test_samples_interleave_categories():
    prompts = [Prompt("a", (f"a{i}",)) for i in range(50)] + [Prompt("b", (f"b{i}",)) for i in range(3)]
    some = sample(prompts, 6, seed=1)
    assert [p.category for p in some] == ["a", "b"] * 3
    assert some == sample(prompts, 6, seed=1)
    assert some != sample(prompts, 6, seed=2)
    assert sorted(sample(prompts, None, 1)) == sorted(prompts)
    again = sample(prompts, 60, 1)
    assert again[53:] == again[:7]
    assert sample([], 5, 1) == []
    assert [p.turns[0] for p in first_per_category(prompts, 2)] == ["a0", "a1", "b0", "b1"]


def test_synthetic_prompts_have_the_given_lengths():
    exact = synthetic(4, 100, 20, 0.0, seed=0)
    assert {(len(p.turns[0].split()), p.lengths) for p in exact} == {(100, (20,))}
    assert len({p.turns[0] for p in exact}) == 4
    varied = synthetic(200, 100, 20, 0.5, seed=0)
    lengths = [len(p.turns[0].split()) for p in varied]
    assert 50 <= min(lengths) < 60
    assert 140 < max(lengths) <= 150
    assert {10, 30} <= {p.lengths[0] for p in varied}
    assert synthetic(3, 9, 9, 0, seed=1) != synthetic(3, 9, 9, 0, seed=2)
