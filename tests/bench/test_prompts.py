"""Prompts as they are published, and prompts that are made."""

import json

import pytest

from bench.prompts import Prompt, first_of_each, read_prompts, sample, synthetic


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


def test_share_gpt_takes_what_humans_say(tmp_path):
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
    assert read_prompts(file) == [Prompt("all", ("Hi", "Why?"), (2, 100))], "nobody answered the last one"


@pytest.mark.parametrize("row", [{"text": "x"}, {"turns": [{"role": "user"}]}])
def test_rows_of_another_form_are_named(tmp_path, row):
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"prompt": "good"}) + "\n" + json.dumps(row))
    with pytest.raises(ValueError, match=r"x\.jsonl, row 2"):
        read_prompts(file)


def test_samples_take_from_every_category():
    prompts = [Prompt("a", (f"a{i}",)) for i in range(50)] + [Prompt("b", (f"b{i}",)) for i in range(3)]
    some = sample(prompts, 6, seed=1)
    assert [p.category for p in some] == ["a", "b"] * 3
    assert some == sample(prompts, 6, seed=1)
    assert some != sample(prompts, 6, seed=2)
    assert sorted(sample(prompts, None, 1)) == sorted(prompts)
    again = sample(prompts, 60, 1)
    assert again[53:] == again[:7]
    assert sample([], 5, 1) == []
    assert [p.turns[0] for p in first_of_each(prompts, 2)] == ["a0", "a1", "b0", "b1"]


def test_synthetic_prompts_have_the_lengths_asked_for():
    exact = synthetic(4, 100, 20, 0.0, seed=0)
    assert {(len(p.turns[0].split()), p.lengths) for p in exact} == {(100, (20,))}
    assert len({p.turns[0] for p in exact}) == 4
    varied = synthetic(200, 100, 20, 0.5, seed=0)
    lengths = [len(p.turns[0].split()) for p in varied]
    assert 50 <= min(lengths) < 60
    assert 140 < max(lengths) <= 150
    assert {10, 30} <= {p.lengths[0] for p in varied}
    assert synthetic(3, 9, 9, 0, seed=1) != synthetic(3, 9, 9, 0, seed=2)
