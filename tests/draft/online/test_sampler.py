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
    """Of evaluations of 8 packs of 32 rows, so of 16 segments."""
    return SegmentSampler(ReplayBuffer(1 << 20, 4, 64, 8, held_out=1), PackShape(1, 64, 32, 2), 1.0)


def add(sampler, numbers):
    """Segments whose tokens are all the segment's number."""
    for number in numbers:
        rows = np.zeros((ROWS, 4), np.uint8)
        sampler.buffer.add(Record(np.full(ROWS + 1, number, np.uint32), rows, 0, 0, 0.0, 0, held_out=True))


def seen(batches):
    return sorted({int(number) for batch in batches for number in np.unique(batch.tokens) if number})


def test_recent_and_earliest_segments(sampler):
    assert sampler.recent_held_out() == sampler.earliest_held_out() == []
    add(sampler, range(1, 41))
    assert seen(sampler.recent_held_out()) == list(range(25, 41))
    assert seen(sampler.earliest_held_out()) == list(range(1, 17))


def test_earlier_traffic_is_that_of_the_present_weights(sampler):
    """Recent segments are of former weights, too, until those of the present ones suffice."""
    add(sampler, range(1, 21))
    sampler.buffer.outdate()
    add(sampler, range(21, 25))
    assert seen(sampler.recent_held_out()) == list(range(9, 25))
    assert seen(sampler.earliest_held_out()) == list(range(21, 25))
    add(sampler, range(25, 45))
    assert seen(sampler.recent_held_out()) == list(range(29, 45))
    assert seen(sampler.earliest_held_out()) == list(range(21, 37))
