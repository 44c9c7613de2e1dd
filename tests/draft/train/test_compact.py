"""What a training on another machine needs: answers in one small file, batches prepared ahead, states on the device."""

import itertools
import threading

import jax
import numpy as np
import pytest

from outrider.errors import ConfigError
from services.draft.learning.records import resident
from services.draft.learning.records.ahead import AheadOfTime
from services.draft.learning.records.batches import Batches
from services.draft.learning.records.resident import ResidentStates, resident_states
from services.draft.train.data.compact import read_compact, write_compact
from services.draft.train.data.prompts import read_conversations
from tests.support.draft.training import random_record, store_of


def records_of(count=7, **options):
    rng = np.random.default_rng(2)
    return [random_record(rng, int(n), 5, **options) for n in rng.integers(12, 60, count)]


def test_answers_keep_how_they_were_sampled(tmp_path):
    records = [*records_of(), *records_of(3, first=3, temperature=1.0, seed=2**63 + 5, held_out=True)]
    write_compact(store_of(tmp_path / "store", records).read(), tmp_path / "answers.npz")
    found = read_compact(tmp_path / "answers.npz")
    assert len(found) == len(records)
    for one, record in zip(found, records, strict=True):
        np.testing.assert_array_equal(one.tokens, record.tokens)
        facts = (one.prompt, one.first, one.temperature, one.seed, one.held_out)
        assert facts == (record.prompt, record.first, record.temperature, record.seed, record.held_out)
    assert (tmp_path / "answers.npz").stat().st_size < 2 * sum(len(one.tokens) for one in records) + 3000
    assert len(read_conversations([str(tmp_path / "answers.npz")], limit=4)) == 4


def test_damaged_answers_are_refused(tmp_path):
    file = tmp_path / "answers.npz"
    file.write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ConfigError, match="as --export-answers writes it"):
        read_conversations([str(file)])
    write_compact(store_of(tmp_path / "store", records_of(2)).read(), file)
    with np.load(file) as arrays:
        np.savez(file, **{name: array[:1] if name == "seeds" else array for name, array in dict(arrays).items()})
    with pytest.raises(ConfigError, match="damaged"):
        read_conversations([str(file)])


def test_resident_states_make_the_same_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(resident, "_SLAB_ROWS", 64)  # several slabs, and records across their borders
    reader = store_of(tmp_path / "store", records_of(12)).read()
    indices = [0, 1, 3, 4, 6, 7, 8, 11]
    own, there = (Batches(reader, indices, rows=64, unroll_steps=2, seed=1) for _ in range(2))
    there.resident = ResidentStates(reader, indices)
    for one, other in itertools.islice(zip(own.since(0), there.since(0), strict=True), 2 * own.epoch):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert resident_states(reader, indices) is None, "on a CPU states stay in their files"
    assert jax.devices()[0].platform == "cpu"


def test_batches_are_prepared_ahead_and_errors_arrive():
    made, enough = [], threading.Event()

    def stream():
        for i in range(9):
            made.append(i)
            if i == 3:
                enough.set()
            yield i
        raise ValueError("a broken file")

    with AheadOfTime(stream()) as batches:
        assert enough.wait(5), "without a request"
        assert [next(batches) for _ in range(9)] == list(range(9))
        with pytest.raises(ValueError, match="a broken file"):
            next(batches)
    with AheadOfTime(itertools.count()) as batches:
        assert next(batches) == 0
    assert not any(thread.name == "batches" for thread in threading.enumerate())
