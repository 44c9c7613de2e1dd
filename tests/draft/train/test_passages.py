"""User turns that quote earlier answers of the target."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.text.tokenizer import Tokenizer
from services.draft.learning.records.store import Record, Store
from services.draft.train.data.collect import Collector, Limits
from services.draft.train.data.passages import Passages, quotes
from services.draft.train.data.prompts import Conversation, PromptJob, jobs, read_openings
from tests.support.tiny import write_tokenizer

ROW = 8  # bytes


@pytest.fixture
def tokenizer(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer")
    return Tokenizer({file.name: file.read_bytes() for file in folder.iterdir()})


def answered(tokenizer, number, *, temperature=0.0, held_out=False):
    """A record of a question with a number, and an answer of five whole sentences and a part of one."""
    prompt = tokenizer.encode_chat([{"role": "user", "content": f"What is {number}?"}])
    text = f"Number {number} stands before number {number + 1}, as everybody knows. " * 5 + "And so"
    tokens = np.array([*prompt, *tokenizer.encode_rendered(text)], np.uint32)
    rows = np.zeros((len(tokens) - 1, ROW), np.uint8)
    return Record(tokens, rows, len(prompt), len(prompt), temperature, number, held_out)


def store_of(folder, records):
    store = Store(folder, {}, ROW)
    for job, record in enumerate(records):
        store.add(job, [record])
    return store


def test_quotes_are_whole_sentences_of_cool_answers(tmp_path, tokenizer):
    kept = [answered(tokenizer, number) for number in range(20)]
    others = [answered(tokenizer, 70, held_out=True), answered(tokenizer, 80, temperature=1.0)]
    passages = Passages(store_of(tmp_path / "store", [*kept, *others]), tokenizer)
    turns = [passages.fill("Read:\n{passages}\n\nQuestion: {question}", seed) for seed in range(60)]
    assert turns == [passages.fill("Read:\n{passages}\n\nQuestion: {question}", seed) for seed in range(60)]
    for turn in turns:
        text, question = turn.removeprefix("Read:\n").split("\n\nQuestion: ")
        assert text.endswith("knows.")
        assert 160 <= len(text) <= 3300
        number = question.removeprefix("What is ").removesuffix("?")
        assert f"Number {number} stands" in text
        assert "Number 70" not in text
        assert "Number 80" not in text
    assert len(set(turns)) == 60
    assert len({len(turn) // 500 for turn in turns}) > 3
    sentence = passages.fill("Translate: {sentence}", 3)
    assert sentence.startswith("Translate: Number ")
    assert sentence.count(".") == 1


def test_nothing_is_quoted_from_few_answers(tmp_path, tokenizer):
    store = store_of(tmp_path / "store", [answered(tokenizer, number) for number in range(3)])
    assert not Passages(store, tokenizer).fill("{passages}", 1)


def test_only_the_answer_to_a_quoting_turn_is_learned(tmp_path, tokenizer):
    asked = []

    async def write(prompt, sampling, new):
        asked.append(tokenizer.decode(prompt))
        tokens = np.array([*prompt, 40, 41, 42], np.uint32)
        return tokens, np.zeros((len(tokens) - 1, ROW), np.uint8)

    client = SimpleNamespace(tokenizer=tokenizer, write=write, info=SimpleNamespace(eos_token_ids=[1]))
    store = store_of(tmp_path / "store", [answered(tokenizer, number) for number in range(20)])
    collector = Collector(client, store, Limits(20, 4000, 1, 10**6, 10**9), 0.0)
    job = PromptJob(99, Conversation("ab", opening="Summarize: {passages}"), 0.0, 7)
    asyncio.run(collector.run(iter([job])))
    assert len(asked) == 1
    assert asked[0].startswith("Summarize: Number ")
    entry = store.entries[-1]
    assert entry["job"] == 99
    assert entry["first"] == entry["prompt"]
    assert entry["tokens"] == entry["prompt"] + 3


def test_some_bundled_openings_quote():
    openings = read_openings(None)
    quoting = [opening for opening in openings if quotes(opening)]
    assert 10 < len(quoting) < len(openings) // 2
    begun = [next(iter(jobs([], 1, (0.0,), 0, [opening]))).conversation for opening in quoting]
    assert all(conversation.free and quotes(conversation.opening) for conversation in begun)
