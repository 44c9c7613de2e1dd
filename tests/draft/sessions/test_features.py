"""The rows of hidden states that a drafter holds are always contiguous."""

import numpy as np

from outrider.errors import Unavailable
from outrider.serving.features import FeatureBlock, FeatureSpec
from services.draft.drafters.base import Drafter
from services.draft.engine import engine as engine_module
from services.draft.engine.engine import DraftEngine
from services.draft.sessions.features import FeatureRows
from services.draft.sessions.frontier import TreeLimits
from tests.support.checkpoints.heads import eagle, write_head
from tests.support.draft.helpers import feature_engine, ngram, request, settle
from tests.support.tiny import write_model


class Fed(Drafter):
    """A drafter that only checks for missing rows."""

    name, features = "FED", FeatureSpec(final=True)

    def open(self, session):
        pass

    def close(self, session):
        pass

    def will_commit(self, session, count, path):
        return False

    def did_commit(self, session, kept):
        pass

    def features_changed(self, session):
        if session.features.lost:
            raise Unavailable("rows are missing")

    def expand(self, requests):
        return []

    def warm_up(self):
        pass


def rows(first, count):
    return np.arange(first, first + count, dtype=np.uint8)[:, None] * np.ones((1, 3), np.uint8)


def held(run):
    return (run.first, len(run), run.end)


def test_rows_are_contiguous_and_taken_in_order():
    run = FeatureRows()
    run.add(0, rows(0, 4))
    run.add(4, rows(4, 3))
    run.add(2, rows(2, 4))  # known already
    run.add(5, rows(5, 4))  # known in part
    assert held(run) == (0, 9, 9)
    assert np.array_equal(run.take(5), rows(0, 5))
    assert held(run) == (5, 4, 9)
    run.add(9, rows(9, 1))
    assert np.array_equal(run.take(), rows(5, 5))
    assert held(run) == (10, 0, 10)
    assert run.take().shape[0] == 0


def test_skipped_rows_may_be_missing():
    run = FeatureRows()
    run.skip(3)
    run.add(0, rows(0, 2))
    assert held(run) == (3, 0, 3)
    run.add(2, rows(2, 6))
    assert held(run) == (3, 5, 8)
    run.skip(5)
    run.skip(4)
    run.add(0, rows(0, 9))  # the target was asked to send everything again
    assert held(run) == (5, 4, 9)
    assert np.array_equal(run.take(), rows(5, 4))


def test_rows_behind_a_gap_are_dropped():
    run = FeatureRows()
    run.add(0, rows(0, 4))
    run.add(6, rows(6, 2))
    run.add(4, rows(4, 2))
    assert run.lost
    assert held(run) == (0, 4, 4)
    run.give_up()
    assert held(run) == (0, 0, 0)


def test_rows_do_not_keep_their_frame_in_memory():
    frame = rows(0, 200)
    run = FeatureRows()
    run.add(0, frame[:2])
    assert run.nbytes == 6
    frame[:] = 0
    assert np.array_equal(run.take(), rows(0, 2))


def test_waiting_sessions_hold_limited_features(tmp_path, monkeypatch):
    """The limit is for all together. The last session drops its rows first, and requests them again later."""
    target = write_model(tmp_path / "target", tie_word_embeddings=False)
    engine = feature_engine("EAGLE", write_head(tmp_path / "head", *eagle(target)), target, max_running_requests=1)
    width = engine.drafter.runner.feature_width * 4
    monkeypatch.setattr(engine_module, "_MAX_WAITING_BYTES", 10 * width)
    for session_id in range(1, 5):
        engine.open(request(session_id, [5, 6, 7, 8]))
    settle(engine)
    first, second, third = (session.features for session in engine.waiting.values())

    def feed(session_id, position, count):
        engine.receive_features([FeatureBlock(session_id, position, np.zeros((count, width), np.uint8))])
        return len(first), len(second), len(third)

    assert [feed(2, 0, 3), feed(3, 0, 3), feed(4, 0, 3)] == [(3, 0, 0), (3, 3, 0), (3, 3, 3)]
    assert feed(2, 3, 3) == (6, 3, 0)
    assert feed(4, 3, 3) == (6, 3, 0)
    assert [run.lost for run in (first, second, third)] == [False, False, True]
    assert feed(2, 6, 5) == (0, 0, 0), "one alone may be too large"


def test_drafter_without_features_ignores_them():
    engine = ngram()
    engine.open(request(1, [5, 6, 7]))
    engine.receive_features(
        [FeatureBlock(1, 0, np.zeros((2, 7), np.uint8)), FeatureBlock(9, 0, np.zeros((1, 1), np.uint8))]
    )
    assert len(engine.running[1].features) == 0


def test_waiting_sessions_with_lost_rows_fail_in_turn():
    """Each frees its slot for the next one, which fails, too; the last one, whose rows are complete, keeps it."""
    count = 2000
    engine = DraftEngine(Fed(), TreeLimits(), 1)
    for session_id in range(count + 2):
        engine.open(request(session_id, [5, 6, 7]))
    row = np.zeros((1, 4), np.uint8)
    engine.receive_features([FeatureBlock(session_id, 1, row) for session_id in range(1, count + 1)])
    engine.close(0)
    failed = [failure.session_id for failure in engine.step().failures]
    assert failed == list(range(1, count + 1))
    assert list(engine.running) == [count + 1]


def test_session_with_lost_rows_frees_its_slot():
    engine = DraftEngine(Fed(), TreeLimits(), 1)
    for session_id in (1, 2):
        engine.open(request(session_id, [5, 6, 7]))
    engine.receive_features([FeatureBlock(1, 1, np.zeros((1, 4), np.uint8))])
    assert list(engine.running) == [2]
