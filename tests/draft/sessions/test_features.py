"""The rows of hidden states that a drafter holds: always one run without a gap."""

import numpy as np

from outrider.errors import Unavailable
from outrider.serving.features import FeatureBlock, FeatureSpec
from services.draft.drafters.base import Drafter
from services.draft.engine import engine as engine_module
from services.draft.engine.engine import DraftEngine
from services.draft.sessions.features import FeatureRows
from services.draft.sessions.frontier import TreeLimits
from tests.support.checkpoints.heads import eagle, write_head
from tests.support.draft.helpers import fed, ngram, request, settle
from tests.support.tiny import write_model


class Fed(Drafter):
    """Knows nothing, but that rows are missing."""

    name, features = "FED", FeatureSpec(final=True)

    def open(self, session):
        pass

    def close(self, session):
        pass

    def will_commit(self, session, count, path):
        return False

    def did_commit(self, session, kept):
        pass

    def fed(self, session):
        if session.features.lost:
            raise Unavailable("rows are missing")

    def grow(self, wishes):
        return []

    def warm_up(self):
        pass


def rows(first, count):
    return np.arange(first, first + count, dtype=np.uint8)[:, None] * np.ones((1, 3), np.uint8)


def held(run):
    return (run.first, len(run), run.end)


def test_rows_follow_one_another_and_are_taken_in_order():
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


def test_rows_that_are_not_needed_may_come_or_not():
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


def test_behind_a_gap_nothing_is_of_use():
    run = FeatureRows()
    run.add(0, rows(0, 4))
    run.add(6, rows(6, 2))
    run.add(4, rows(4, 2))
    assert run.lost
    assert held(run) == (0, 4, 4)
    run.give_up()
    assert held(run) == (0, 0, 0)


def test_rows_do_not_keep_the_frame_that_they_came_in():
    frame = rows(0, 200)
    run = FeatureRows()
    run.add(0, frame[:2])
    assert run.nbytes == 6
    frame[:] = 0
    assert np.array_equal(run.take(), rows(0, 2))


def test_sessions_that_wait_hold_no_more_than_they_may(tmp_path, monkeypatch):
    """All together. The last one gives up first, and asks for its rows again once it has a place."""
    target = write_model(tmp_path / "target", tie_word_embeddings=False)
    engine = fed("EAGLE", write_head(tmp_path / "head", *eagle(target)), target, max_running_requests=1)
    width = engine.drafter.runner.feature_width * 4
    monkeypatch.setattr(engine_module, "_MOST_WAITING", 10 * width)
    for session_id in range(1, 5):
        engine.open(request(session_id, [5, 6, 7, 8]))
    settle(engine)
    first, second, third = (session.features for session in engine._places[-1].waiting.values())

    def feed(session_id, position, count):
        engine.receive_features([FeatureBlock(session_id, position, np.zeros((count, width), np.uint8))])
        return len(first), len(second), len(third)

    assert [feed(2, 0, 3), feed(3, 0, 3), feed(4, 0, 3)] == [(3, 0, 0), (3, 3, 0), (3, 3, 3)]
    assert feed(2, 3, 3) == (6, 3, 0)
    assert feed(4, 3, 3) == (6, 3, 0)
    assert [run.lost for run in (first, second, third)] == [False, False, True]
    assert feed(2, 6, 5) == (0, 0, 0), "one alone may be too large"


def test_a_drafter_that_needs_no_features_ignores_them():
    engine = ngram()
    engine.open(request(1, [5, 6, 7]))
    engine.receive_features(
        [FeatureBlock(1, 0, np.zeros((2, 7), np.uint8)), FeatureBlock(9, 0, np.zeros((1, 1), np.uint8))]
    )
    assert len(engine.running[1].features) == 0


def test_many_sessions_that_waited_in_vain_for_their_rows_fail_one_after_another():
    """Each leaves its place to the next one, which fails, too; the last one, whose rows were not lost, has it then."""
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


def test_a_session_whose_rows_are_lost_leaves_its_place_to_the_next_one():
    engine = DraftEngine(Fed(), TreeLimits(), 1)
    for session_id in (1, 2):
        engine.open(request(session_id, [5, 6, 7]))
    engine.receive_features([FeatureBlock(1, 1, np.zeros((1, 4), np.uint8))])
    assert list(engine.running) == [2]
