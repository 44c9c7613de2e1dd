"""Prompts and their order, and the store of answers on disk."""

import errno
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from outrider.checkpoints.disk import write_atomically
from outrider.errors import ConfigError
from services.draft.learning.records.batches import Batches, learnt_rows
from services.draft.learning.records.store import Store
from services.draft.learning.records.vocabulary import coverage, draft_ids, frequent_tokens
from services.draft.train.data.prompts import is_held_out, jobs, read_conversations, read_openings
from tests.support.draft.training import HIDDEN, random_record, store_of

# --- prompts ---


def write(folder, *lines):
    file = folder / "prompts.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(file)


def test_all_kinds_of_prompts(tmp_path):
    file = write(
        tmp_path, {"prompt": "a", "category": "x"}, {"text": "b"}, {"turns": ["c", "d"]}, "",
        {"messages": [{"role": "system", "content": "e"}, {"role": "user", "content": "f"},
                      {"role": "assistant", "content": "not learnt"}]}, {"prompt": "a"},
    )  # fmt: skip
    prompt, text, turns, messages = read_conversations([file])
    assert (prompt.turns, text.text, turns.turns) == (("a",), "b", ("c", "d"))
    assert (messages.messages, messages.turns) == ((("system", "e"),), ("f",))
    assert len({prompt.name, text.name, turns.name, messages.name}) == 4
    assert [c.name for c in read_conversations([file], limit=2)] == [prompt.name, text.name]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not valid JSON"), ("[]", "an object with one of"), ({"question": "a"}, "one of prompt, text"),
        ({"prompt": "a", "text": "b"}, "one of"), ({"prompt": ""}, "must be a text"), ({"turns": []}, "not empty"),
        ({"turns": ["a", 1]}, "turns must be texts"), ({"messages": [{"role": "user"}]}, "a role and a content"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "a user message to answer"),
    ],
)  # fmt: skip
def test_wrong_prompts_are_refused_by_line(tmp_path, line, what):
    with pytest.raises(ConfigError, match=f"line 2.*{what}"):
        read_conversations([write(tmp_path, {"prompt": "fine"}, line)])


def test_rollouts_are_read_as_engines_and_trainers_write_them(tmp_path):
    """Each is one job; the same tokens in another form are the same rollout."""
    info = {"prompt_tokens": 3, "input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-2.0, 7, "x"]],
            "output_token_logprobs": [[-0.5, 8, None], [-0.1, 9, None]]}  # fmt: skip
    forms = [
        {"input_ids": [5, 6, 7], "output_ids": [8, 9], "meta_info": {"id": "a"}, "text": "not read"},
        {"input_ids": [5, 6, 7], "meta_info": info},
        {"meta_info": info},
        {"tokens": [5, 6, 7, 8, 9], "response_length": 2, "rollout_log_probs": [-0.5, -0.1], "loss_mask": [1, 1],
         "prompt": "not read", "reward": 1.0},
    ]  # fmt: skip
    for form in forms:
        (found,) = read_conversations([write(tmp_path, form)])
        assert (found.rollout.tokens.tolist(), found.rollout.prompt) == ([5, 6, 7, 8, 9], 3)
        assert not found.chat
        assert not found.free
    found = read_conversations([write(tmp_path, *forms, {"tokens": [5, 6, 7, 8, 10], "response_length": 2})])
    assert len(found) == 2
    assert len(list(jobs(found, None, (0.0, 1.0), 0))) == 2


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"tokens": [1, 2, 3]}, "response_length"), ({"tokens": [1, 2], "response_length": 2}, "response_length"),
        ({"tokens": [1, True], "response_length": 1}, "list of token ids"), ({"output_ids": [3]}, "input_ids must"),
        ({"input_ids": [3], "output_ids": []}, "output_ids must"), ({"input_ids": [-1], "output_ids": [1]}, "ids"),
        ({"meta_info": 3}, "input_ids must"), ({"input_ids": [[1, 2]], "output_ids": [1]}, "input_ids must"),
        ({"output_ids": [1], "meta_info": {"prompt_tokens": 9, "input_token_logprobs": [[-1.0, 6]]}}, "input_ids must"),
    ],
)  # fmt: skip
def test_wrong_rollouts_are_refused_by_line(tmp_path, line, what):
    with pytest.raises(ConfigError, match=f"line 2.*{what}"):
        read_conversations([write(tmp_path, {"tokens": [1, 2], "response_length": 1}, line)])


def test_lines_with_invalid_characters_are_refused(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "\xc3\xa4"}\n{"prompt": "a \\ud83d\\ude00"}\n'
    )  # a mark of the order of bytes
    assert [conversation.turns for conversation in read_conversations([str(file)])] == [("ä",), ("a 😀",)]
    for line, what in ((b'{"prompt": "\xe4"}', "not UTF-8"), (b'{"turns": ["a", "\\ud83d"]}', "surrogate")):
        file.write_bytes(b'{"prompt": "fine"}\n' + line)
        with pytest.raises(ConfigError, match=f"line 2.*{what}"):
            read_conversations([str(file)])


def test_files_that_are_missing_or_empty_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_conversations([str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match="has no prompts"):
        read_conversations([write(tmp_path)])


def test_jobs_alternate_temperatures_and_repeat_nothing(tmp_path):
    asked = read_conversations([write(tmp_path, *({"prompt": f"p{i}"} for i in range(6)))])
    first = list(itertools.islice(jobs(asked, 2, (0.0, 1.0), seed=3), 40))
    assert [job.key for job in first] == [job.key for job in itertools.islice(jobs(asked, 2, (0.0, 1.0), 3), 40)]
    assert len({job.key for job in first}) == 40
    by_name: dict = {}
    for job in first[:16]:
        by_name.setdefault(job.conversation.name, []).append(job.temperature)
    named = [by_name[c.name] for c in asked]
    assert all(sorted(temperatures) == [0.0, 1.0] for temperatures in named)
    greedy = [job.conversation.name for job in first if job.temperature == 0 and not job.conversation.free]
    assert sorted(greedy) == sorted(c.name for c in asked)
    assert sum(job.conversation.free for job in first[:16]) == 4
    # Those that the target begins are never the same; if all else is greedy, there is an end.
    assert len({job.conversation.name for job in first if job.conversation.free}) > 4
    assert len(list(jobs(asked, None, (0.0,), 0))) == 6


def test_openings_are_used_in_turn(tmp_path):
    own = write(tmp_path, "Summarize:\\n\\n", "", "Who")
    openings = read_openings(own)
    assert openings == ["Summarize:\n\n", "Who"]
    assert len(set(read_openings(None))) == len(read_openings(None)) > 100
    with pytest.raises(ConfigError, match="no such file"):
        read_openings(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="has no line"):
        read_openings(write(tmp_path, ""))

    begun = list(itertools.islice(jobs([], 4, (0.0, 1.0), 3, openings), 8))
    assert sorted(job.conversation.opening for job in begun) == ["Summarize:\n\n"] * 4 + ["Who"] * 4
    assert len({job.conversation.name for job in begun}) == 8
    assert all(job.conversation.free for job in begun)


def test_held_out_conversations_depend_on_their_name_alone():
    names = [f"{i:016x}" for i in range(4000)]
    held = [is_held_out(name, 0.05) for name in names]
    assert 140 < sum(held) < 260
    assert not any(is_held_out(name, 0.0) for name in names)


# --- store ---


def same(found, record):
    np.testing.assert_array_equal(found.tokens, record.tokens)
    np.testing.assert_array_equal(found.rows, record.rows)
    assert (found.prompt, found.first, found.temperature, found.seed, found.held_out) == (
        record.prompt, record.first, record.temperature, record.seed, record.held_out,
    )  # fmt: skip


def some_records(count=5):
    rng = np.random.default_rng(0)
    return [
        random_record(rng, 8 + i, prompt=4, first=3, temperature=i % 2, seed=2**63 + i, held_out=i == 2)
        for i in range(count)
    ]


def test_records_are_read_as_written(tmp_path):
    records = some_records()
    store_of(tmp_path / "store", records[:3])
    store = Store(tmp_path / "store", {"layers": [2, 4, 5]}, 8 * HIDDEN)
    for job, record in enumerate(records[3:], start=3):
        store.add(job, [record])
    assert (len(store), store.jobs) == (5, set(range(5)))
    assert store.token_count == sum(len(r.tokens) - 3 for r in records)
    reader = store.read()
    for i, record in enumerate(records):
        same(reader.record(i), record)
    assert (reader.choose(held_out=True), reader.choose(held_out=False)) == ([2], [0, 1, 3, 4])


def test_incomplete_data_of_an_interrupted_run_is_truncated(tmp_path):
    records = some_records()
    store = store_of(tmp_path, records[:3])
    whole = {name: (tmp_path / name).read_bytes() for name in ("tokens.bin", "rows-0000.bin", "records.bin")}
    store.add(3, [records[3]])
    for name, content in whole.items():  # all but the last bytes of the entry came to the disk
        grown = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(grown[:-5] if name == "records.bin" else grown + b"more")
        assert len(grown) > len(content)
    store.close()
    store = Store(tmp_path, {"layers": [2, 4, 5]}, 8 * HIDDEN)
    assert len(store) == 3
    assert {name: (tmp_path / name).read_bytes() for name in whole} == whole
    store.add(4, [records[4]])
    same(store.read().record(3), records[4])


@pytest.mark.parametrize("name", ["rows-0000.bin", "rows-0001.bin", "tokens.bin"])
def test_records_with_missing_content_are_dropped(tmp_path, monkeypatch, name, caplog):
    """As after a crash of the machine: entries may reach the disk before their content."""
    monkeypatch.setattr("services.draft.learning.records.store._FILE_BYTES", 8 * 8 * HIDDEN)
    records = some_records()
    store = store_of(tmp_path, records)
    store.close()
    size = (tmp_path / name).stat().st_size
    with (tmp_path / name).open("r+b") as file:
        file.truncate(size - 1)
    again = Store(tmp_path, {"layers": [2, 4, 5]}, 8 * HIDDEN)
    kept = {"rows-0000.bin": 1, "rows-0001.bin": 2, "tokens.bin": 4}[name]
    assert (len(again), again.jobs) == (kept, set(range(kept)))
    assert "are incomplete" in caplog.text
    for job in range(kept, len(records)):
        again.add(job, [records[job]])
    reader = again.read()
    for i, record in enumerate(records):
        same(reader.record(i), record)


@pytest.mark.parametrize("left", [7, 1000])
def test_file_without_an_entry_is_removed(tmp_path, monkeypatch, left):
    """As after an interruption while the first rows of a file are written."""
    monkeypatch.setattr("services.draft.learning.records.store._FILE_BYTES", 1)
    records = some_records(3)
    store_of(tmp_path, records[:1])
    (tmp_path / "rows-0001.bin").write_bytes(bytes(left))
    again = Store(tmp_path, {"layers": [2, 4, 5]}, 8 * HIDDEN)
    for job, record in enumerate(records[1:], start=1):
        again.add(job, [record])
    reader = again.read()
    for i, record in enumerate(records):
        same(reader.record(i), record)


def test_answers_to_other_settings_are_not_mixed(tmp_path):
    store_of(tmp_path, some_records(1))
    with pytest.raises(ConfigError, match=r"layers was \[2, 4, 5\], not \[1, 4, 5\].*--answers"):
        Store(tmp_path, {"layers": [1, 4, 5]}, 8 * HIDDEN)


def test_one_run_writes_and_many_read(tmp_path):
    records = some_records()
    first = store_of(tmp_path, records[:2])
    with (tmp_path / "records.bin").open("ab") as entries:
        entries.write(b"under way")
    with pytest.raises(ConfigError, match=r"another training writes.*--answers"):
        Store(tmp_path, {"layers": [2, 4, 5]}, 8 * HIDDEN)
    early = Store(tmp_path, {"layers": [2, 4, 5]}, 8 * HIDDEN, enough=first.token_count)
    same(early.read().record(1), records[1])
    with pytest.raises(ConfigError, match="another training writes"):
        Store(tmp_path, {"layers": [2, 4, 5]}, 8 * HIDDEN, enough=first.token_count + 1)
    assert (tmp_path / "records.bin").read_bytes().endswith(b"under way")
    first.close()
    second = Store(tmp_path, {"layers": [2, 4, 5]}, 8 * HIDDEN)
    second.add(2, [records[2]])
    same(first.read().record(1), records[1])
    same(second.read().record(2), records[2])


class Full:
    """Tokens that cannot be written, because the disk is full."""

    def __len__(self):
        return 12

    def astype(self, _):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_answer_truncated_by_a_full_disk_is_removed(tmp_path):
    records = some_records()
    store = store_of(tmp_path, records[:2])
    sizes = {path: path.stat().st_size for path in tmp_path.glob("*.bin")}
    with pytest.raises(OSError, match="No space"):
        store.add(7, [records[2], replace(records[2], tokens=Full())])
    assert {path: path.stat().st_size for path in tmp_path.glob("*.bin")} == sizes
    store.add(8, [records[2]])
    assert (len(store), store.jobs) == (3, {0, 1, 8})
    for index, record in enumerate(records[:3]):
        same(store.read().record(index), record)


def test_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    write_atomically(file, "first")

    def fill(path, text):
        path.write_bytes(text[:3].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(file), "write_text", fill)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "second")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("config.json", "first")]


# --- vocabulary and batches ---


def test_the_vocabulary_are_the_most_frequent_tokens():
    texts = [np.array([5, 5, 7, 1]), np.array([7, 5, 9])]
    ids = frequent_tokens(texts, 12, 3)
    assert ids.tolist() == [1, 5, 7]  # of those that occur once, the lowest
    assert coverage(texts, ids, 12) == pytest.approx(6 / 7)
    assert draft_ids(ids, 12).tolist() == [-1, 0, -1, -1, -1, 1, -1, 2, -1, -1, -1, -1]
    with pytest.raises(ConfigError, match="--draft-vocab-size"):
        frequent_tokens(texts, 12, 13)


def test_batches_hold_every_row_once_an_epoch_and_resume(tmp_path):
    rng = np.random.default_rng(1)
    lengths = [*rng.integers(12, 90, 60).tolist(), 900, 1300]
    prompts = [6] * 60 + [700, 1100]
    records = [random_record(rng, n, prompts[i], temperature=i % 2, held_out=i == 0) for i, n in enumerate(lengths)]
    reader = store_of(tmp_path, records).read()
    learnt = reader.choose(held_out=False)
    batches = Batches(reader, learnt, rows=300, unroll_steps=3, seed=4)
    assert [shape.length for shape, _ in batches.shapes] == [768, 1312]
    epoch = list(itertools.islice(batches.since(0), batches.epoch))
    counts = learnt_rows(reader.entries)[1]
    assert batches.learnt == counts[learnt].sum() == sum(int((batch.reach > 0).sum()) for batch in epoch)
    seen = []
    for batch in epoch:
        for b in range(len(batch.rows)):
            for row, reach, sampled in zip(batch.rows[b], batch.reach[b], batch.sampled[b], strict=True):
                if reach:
                    ahead = batch.tokens[b, row : row + reach + 1]
                    seen.append((*ahead[:2].tolist(), int(batch.positions[b, row]), int(reach), bool(sampled)))
    expected = []
    for i in learnt:
        record = records[i]
        tokens, size = record.tokens.tolist(), len(record.rows)
        for row in range(record.first - 1, size - 1):
            sampled = record.temperature > 0
            expected.append((tokens[row + 1], tokens[row + 2], row, size - 1 - row, sampled))
    assert sorted(seen) == sorted(expected)
    again = itertools.islice(batches.since(batches.epoch + 1), 2)
    straight = itertools.islice(batches.since(0), batches.epoch + 1, batches.epoch + 3)
    for one, other in zip(again, straight, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))
