"""Which held-out segments an evaluation sees."""

import numpy as np
import pytest

from services.draft.learning.records.batches import PackShape
from services.draft.learning.records.store import Record
from services.draft.online.replay_buffer import ReplayBuffer
from services.draft.online.sampler import SegmentSampler

ROWS = 17  # of a segment, 16 of them trained


@pytest.fixture
def sampler():
    """Of evaluations of 8 packs of 32 rows, so of 16 recent segments, and of twice as many earlier ones."""
    return SegmentSampler(ReplayBuffer(1 << 20, 4, 64, 8, held_out=1), PackShape(1, 64, 32, 2), 1.0)


def add(sampler, numbers, rows=ROWS):
    """Segments whose tokens are all the segment's number."""
    for number in numbers:
        tokens, states = np.full(rows + 1, number, np.uint32), np.zeros((rows, 4), np.uint8)
        sampler.buffer.add(Record(tokens, states, 0, 0, 0.0, 0, held_out=True))


def numbers(segments):
    return [segment.number for segment in segments]


def test_recent_and_earliest_segments(sampler):
    assert sampler.recent_held_out() == sampler.earliest_held_out() == []
    add(sampler, range(1, 41))
    assert numbers(sampler.recent_held_out()) == list(range(40, 24, -1))
    assert numbers(sampler.earliest_held_out()) == list(range(1, 33))
    assert sampler.evaluated_rows(sampler.recent_held_out()) == 16 * 16


def test_earlier_traffic_is_that_of_the_present_weights(sampler):
    """Recent segments are of former weights, too, until those of the present ones suffice."""
    add(sampler, range(1, 21))
    assert not sampler.updated
    sampler.buffer.outdate()
    assert sampler.updated
    add(sampler, range(21, 25))
    assert numbers(sampler.recent_held_out()) == list(range(24, 8, -1))
    assert numbers(sampler.earliest_held_out()) == list(range(21, 25))
    add(sampler, range(25, 65))
    assert numbers(sampler.recent_held_out()) == list(range(64, 48, -1))
    assert numbers(sampler.earliest_held_out()) == list(range(21, 53))


def test_packs_of_an_evaluation():
    """Each segment is in one pack, with the rows that count; of a long segment these are the last ones."""
    sampler = SegmentSampler(ReplayBuffer(1 << 20, 4, 64, 8, held_out=1), PackShape(1, 64, 24, 2), 1.0)
    add(sampler, range(1, 8))
    add(sampler, [8], rows=60)
    chosen, found = sampler.buffer.recent(held_out=True), {}
    for batch, pack in sampler.evaluation_packs(chosen):
        rows = batch.rows[0][batch.reach[0] > 0]
        for place, segment in enumerate(pack, start=1):
            own = np.flatnonzero(batch.segments[0] == place)
            assert set(batch.tokens[0][own].tolist()) == {segment.number}
            found[segment.number] = sorted((rows[np.isin(rows, own)] - own[0]).tolist())
    assert found == {number: list(range(16)) for number in range(1, 8)} | {8: list(range(11, 59))}
    assert sampler.evaluated_rows(chosen) == 7 * 16 + 48
    assert not sampler.empty_evaluation().reach.any()
