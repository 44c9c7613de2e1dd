"""What a draft learns from while it serves, and how much time that may take."""

import jax
import numpy as np
import pytest

from outrider.serving.features import FeatureBlock
from outrider.speculation.proposal import Commit, FinishReason
from services.draft.online.background import Background
from services.draft.online.state import STATE, load_state, save_state
from services.draft.online.swap import LearntWeights
from tests.support.draft.online import online_engine
from tests.support.invariance.pair import request


def test_state_is_kept_over_a_restart(models, tmp_path, caplog):
    """Weights in training, moments, vocabulary, buffer and counters; a damaged or foreign state is not used."""
    flags = {"online_output": str(tmp_path / "out")}
    draft = online_engine(models[1], models[0], **flags)
    learner = draft.drafter.learner
    for session_id in range(1, 13):
        serve_random(draft, session_id, low=70)  # half of these tokens have no entry
    for _ in range(5):
        assert learner.run_once() > 0
    learner.serving = learner.serving._replace(part=0.4)
    draft.drafter.stop()
    file = tmp_path / "out" / STATE
    assert [path.name for path in file.parent.iterdir()] == [STATE]

    def facts(learner):
        buffer = learner.sampler.buffer
        segments = [(s.number, s.version, s.key, s.record.tokens.tolist()) for kind in buffer.snapshot() for s in kind]
        return learner.load(), learner.ids.tolist(), sorted(segments), buffer.counters(), learner.sampler.used

    again = online_engine(models[1], models[0], **flags).drafter.learner
    assert facts(again) == facts(learner)
    assert again.serving.part == 0.4
    assert (again.ids != learner.serving.learnt.ids).any(), "the vocabulary has followed the traffic"
    for a, b in zip(*(jax.tree.leaves((one.trainer.state, one.averaged)) for one in (again, learner)), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(again.trainer.target.draft_ids, learner.trainer.target.draft_ids)
    assert again.run_once() > 0
    learner.host.keep(LearntWeights(learner.averaged, learner.ids))  # newer weights than the state
    newer = online_engine(models[1], models[0], **flags).drafter.learner
    assert facts(newer)[2:] == facts(learner)[2:]
    assert newer.ids.tolist() == sorted(learner.ids.tolist())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert not load_state(file.parent, newer, {"weights": ""})
    assert "is damaged" in caplog.text
    assert facts(newer)[2:] == facts(learner)[2:], "a damaged state changes nothing"
    save_state(file.parent, learner, {"target": "a"})
    assert not load_state(file.parent, newer, {"target": "b"})
    assert "it is of another target, 'a' instead of 'b'" in caplog.text


def serve_random(draft, session_id, update=None, low=40):
    """A session of 4 and 80 random tokens. update: called in its middle; low: the lowest token."""
    rng = np.random.default_rng(session_id)
    tokens = rng.integers(low, low + 20, 84).astype(np.uint32)
    draft.open(request(session_id, tokens[:4].tolist(), 0.0, 80))
    rows = np.zeros((83, draft.drafter.received_row_bytes), np.uint8)
    draft.receive_features([FeatureBlock(session_id, 0, rows[:4])])
    if update is not None:
        update()
    draft.receive([], [Commit(session_id, 4, tokens[4:], 1, finish_reason=FinishReason.LENGTH)])
    draft.receive_features([FeatureBlock(session_id, 4, rows[4:])])
    draft.drafter.work()


def test_recordings_outlive_some_updates_of_the_target(models):
    draft = online_engine(models[1], models[0], {"epochs": 1.0, "versions": 2})
    buffer, learner = draft.drafter.learner.sampler.buffer, draft.drafter.learner
    for session_id in range(1, 9):
        serve_random(draft, session_id)
    assert buffer.learnt > 64
    assert learner.run_once() > 0
    room, before = buffer.room, buffer.learnt
    serve_random(draft, 10, lambda: draft.flush(only_fed=True))
    assert (buffer.version, buffer.learnt, buffer.room) == (1, before, room), "what follows is of other weights"
    draft.flush()  # trainers flush at each update
    assert learner.run_once() > 0
    for session_id in range(11, 13):
        serve_random(draft, session_id, lambda: draft.flush(only_fed=True))
        serve_random(draft, 10 * session_id)
    assert {segment.version for segment in buffer.recent(held_out=False)} == {1, 2}
    spent = learner.load().rows
    while learner.run_once():
        pass
    assert learner.load().rows - spent < buffer.recent_learnt + 64, "what was dropped is no reason to learn more"


@pytest.mark.parametrize("share", [0.05, 0.2, 0.9])
def test_training_takes_at_most_its_share(share):
    rng = np.random.default_rng(0)
    now, working = 0.0, 0.0
    starts = []

    def turn():
        nonlocal now, working
        starts.append((now, working))
        spent = float(rng.choice([0.0, 0.003, 0.2, 4.0]))
        now, working = now + spent, working + spent
        return spent

    def rest(seconds):
        nonlocal now
        now += seconds
        return len(starts) >= 300

    Background(turn, share, rest).run()
    assert len(starts) == 300
    assert working > 0
    # At no time has it taken more than its share, a turn under way left aside.
    assert all(spent <= share * time + 1e-9 for time, spent in starts)
    assert working / now <= share + 1e-9


def test_failed_learner_does_not_stop_the_service(caplog):
    def turn():
        raise RuntimeError("no memory")

    background = Background(turn, 0.5)
    background.start()
    background.stop()
    assert "training has ended" in caplog.text
