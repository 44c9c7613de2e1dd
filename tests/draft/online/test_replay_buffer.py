"""The replay buffer: the right rows beside the right tokens, within the limit."""

import numpy as np
import pytest

from services.draft.learning.records.batches import learnt_rows
from services.draft.learning.records.store import Record
from services.draft.online.recording import RecordedFeatures, SessionRecording
from services.draft.online.replay_buffer import ReplayBuffer
from services.draft.sessions.features import FeatureRows

ROW = 4  # bytes; a row holds its own position


def rows(first, count):
    return np.arange(first, first + count, dtype=np.uint32)[:, None].view(np.uint8)


def ring_of(limit=1 << 20, length=20, context=4, held_out=2):
    return ReplayBuffer(limit, ROW, length, context, held_out)


def recent(buffer, *, held_out):
    return buffer.segments(buffer.recent(held_out=held_out))


def session(buffer, prompt, total, chunk=7, temperature=0.0, first=0):
    """A session whose token at position j is 1000 + j."""
    tokens = np.arange(1000, 1000 + total, dtype=np.uint32)
    recording = SessionRecording(buffer, temperature, prompt)
    for start in range(first, total - 1, chunk):
        end = min(start + chunk, total - 1)
        recording.add(start, rows(start, end - start), tokens[: max(end + 1, prompt)])
    recording.finish(tokens)
    return recording


def learnt_tokens(buffer, held_out=False):
    """Positions of the tokens that trainable rows of all segments predict; checks the segments."""
    segments = recent(buffer, held_out=held_out)
    first, count = learnt_rows(segments.entries)
    found = []
    for i in range(len(segments)):
        positions = segments.rows(i).view(np.uint32)[:, 0].astype(int)
        assert len(positions) == segments.entries["rows"][i] <= buffer.length
        np.testing.assert_array_equal(np.diff(positions), 1)
        np.testing.assert_array_equal(segments.tokens(i), 1000 + np.arange(positions[0], positions[-1] + 2))
        found += [int(positions[first[i]] + 2 + k) for k in range(count[i])]
    return found


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize(("prompt", "total"), [(5, 15), (5, 90), (63, 75), (64, 140), (1, 21)])
def test_every_token_of_an_answer_is_trainable_once(prompt, total, chunk):
    """Except the first one, which comes with the prompt, and the last, which has no row."""
    buffer = ring_of()
    session(buffer, prompt, total, chunk)
    found = learnt_tokens(buffer)
    assert len(found) == len(set(found)) == buffer.learnt
    expected = set(range(prompt + 1, total))
    assert set(found) <= expected
    # Where a piece ends a token is lost, as its row is that piece's last one.
    assert len(expected - set(found)) <= 1 + total // (buffer.length - buffer.context)


def test_sessions_are_held_out_as_a_whole():
    """Every other one at first, then one in four."""
    buffer = ring_of(held_out=4)
    for number in range(1, 41):
        session(buffer, 3, 60, temperature=float(number))
    held_out = {*range(2, 33, 2), 36, 40}
    assert set(recent(buffer, held_out=True).entries["temperature"].tolist()) == held_out
    assert set(recent(buffer, held_out=False).entries["temperature"].tolist()) == {*range(1, 41)} - held_out


def test_buffer_keeps_the_latest_segments_within_its_limit():
    buffer = ring_of(limit=2000, held_out=8)
    for number in range(40):
        session(buffer, 3, 30, temperature=float(number))
        assert buffer.bytes <= 1000
    kept = recent(buffer, held_out=False).entries["temperature"].tolist()
    assert kept == sorted(kept)
    assert kept[-1] == 38.0
    assert kept[0] > 20
    assert len(recent(buffer, held_out=True)) >= 1


def test_recordings_have_a_limit_of_their_own():
    buffer = ring_of(limit=400, held_out=8)
    assert [buffer.next_held_out() for _ in range(32)].count(True) == 16
    tokens = np.arange(1000, 1100, dtype=np.uint32)
    first, second, third = (SessionRecording(buffer, 0.0, 2) for _ in range(3))
    for recording in (first, second, third):
        recording.add(0, rows(0, 18), tokens)  # 72 bytes each, of 200
    third.finish(tokens[:19])
    assert buffer.bytes == 0  # there was no room for it
    first.finish(tokens[:19])
    fourth = SessionRecording(buffer, 0.0, 2)
    fourth.add(0, rows(0, 18), tokens)
    fourth.finish(tokens[:19])
    second.finish(tokens[:19])
    assert buffer.learnt == 3 * 16
    assert buffer.reserve(200)
    assert not buffer.reserve(1)


def test_nothing_is_recorded_behind_a_gap():
    buffer = ring_of()
    tokens = np.arange(1000, 1100, dtype=np.uint32)
    recording = SessionRecording(buffer, 0.0, 2)
    recording.add(0, rows(0, 5), tokens)
    recording.add(3, rows(3, 5), tokens)  # three of them again
    recording.finish(tokens)
    assert learnt_tokens(buffer) == [3, 4, 5, 6, 7, 8]
    recording = SessionRecording(buffer, 0.0, 2)
    recording.add(0, rows(0, 5), tokens)
    recording.add(9, rows(9, 5), tokens)
    recording.add(5, rows(5, 3), tokens)
    recording.finish(tokens)
    session(buffer, 2, 40, first=6)  # begins in the midst
    assert len(recent(buffer, held_out=False)) == 1
    assert not len(recent(buffer, held_out=True))


def test_rows_are_recorded_as_they_arrive():
    received = []
    held = FeatureRows()
    held.skip(3)
    held.add(3, rows(3, 4))
    recorded = RecordedFeatures(held, lambda first, part: received.append((first, len(part))))
    recorded.add(7, rows(7, 2))
    assert received == [(3, 4), (7, 2)]
    assert (recorded.first, recorded.end, recorded.lost) == (3, 9, False)
    np.testing.assert_array_equal(recorded.take(), rows(3, 6))


def marked(buffer, number, held_out=False):
    """A segment of 40 bytes, with its number as temperature."""
    buffer.add(Record(np.arange(11, dtype=np.uint32), rows(0, 10), 1, 1, float(number), 0, held_out))


def numbers(segments):
    return [int(segment.record.temperature) for segment in segments]


def test_sample_is_uniform_over_all_held_out_segments():
    """Recent ones are the latest; of the first and the second half of all there are as many in the sample."""
    halves = np.zeros(2, int)
    for seed in range(30):
        buffer = ReplayBuffer(4 * 40 * 20, ROW, 20, 4, 1, seed=seed)
        for number in range(200):
            marked(buffer, number, held_out=True)
            assert buffer.bytes <= 2 * 40 * 20
        assert numbers(buffer.recent(held_out=True)) == list(range(180, 200))
        kept = numbers(buffer.sample())
        assert kept == sorted(kept)
        assert len(kept) == 20
        halves += np.bincount(np.array(kept) // 100, minlength=2)
    assert abs(halves[0] - halves.sum() / 2) < 4 * np.sqrt(halves.sum() / 4)
    marked(buffer, 1)
    assert len(buffer.sample()) == 20, "trained segments are not in the sample"


def test_segments_outlive_some_updates_of_the_target():
    buffer = ReplayBuffer(1 << 20, ROW, 20, 4, 4, versions=2)
    marked(buffer, 1)
    marked(buffer, 2, held_out=True)
    recording = SessionRecording(buffer, 3.0, 1)
    recording.add(0, rows(0, 10), np.arange(1000, 1011, dtype=np.uint32))
    buffer.outdate()
    recording.finish(np.arange(1000, 1011, dtype=np.uint32))  # of the old weights
    marked(buffer, 4)
    assert numbers(buffer.recent(held_out=False)) == [1, 3, 4]
    assert numbers(buffer.recent(held_out=True)) == numbers(buffer.sample()) == [2]
    assert [segment.version for segment in buffer.recent(held_out=False)] == [0, 0, 1]
    buffer.outdate()
    assert numbers(buffer.recent(held_out=False)) == [4]
    assert numbers(buffer.recent(held_out=True)) == numbers(buffer.sample()) == []
    buffer.outdate()
    assert buffer.version == 2, "another gateway reported the same update"
    assert numbers(buffer.recent(held_out=False)) == [4]
