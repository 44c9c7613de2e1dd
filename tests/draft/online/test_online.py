"""A draft that is trained while it serves: its draft tokens improve, and the text does not change."""

import errno
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors import SafetensorError

from outrider.config import DraftConfig, ServeConfig
from outrider.errors import ConfigError
from outrider.placement.cores import CorePlan
from outrider.serving.features import FeatureBlock
from outrider.serving.messages import cache_salt_of, own_salt
from outrider.speculation.proposal import Commit, FinishReason
from outrider.supervisor.app import configure
from services.draft.online.setup import ORIGIN, weight_writer
from services.draft.online.swap import LearntWeights
from services.draft.process.app import build
from tests.support.checkpoints.perfect import write_cyclic_target
from tests.support.draft.helpers import settle
from tests.support.draft.online import LearningPair, online_engine, some_requests
from tests.support.gateway.services import Gateway
from tests.support.invariance.engines import target_engine
from tests.support.invariance.pair import Faults, Pair, request
from tests.support.system.heads import VERIFY_ALL, accepted, ask_all
from tests.support.system.services import draft_service, target_service
from tests.support.tiny import VOCAB, write_tokenizer

NOTHING = LearntWeights({}, np.zeros(0, np.int64))
FAULTS = Faults(lost=0.03, doubled=0.1, delay=2)


@pytest.fixture(scope="module")
def target(models):
    return target_engine(models[0], max_step_tokens=16)


@pytest.fixture(scope="module")
def learnt(models, target, tmp_path_factory):
    """An engine that has served and trained, its output folder, and accepted draft tokens by run."""
    folder = tmp_path_factory.mktemp("learnt") / "draft"
    draft = online_engine(models[1], models[0], online_output=str(folder))
    accepted = []
    for number in range(20):
        todo = some_requests(number)
        # Weights change in the midst of sessions, also of such as have lost messages and are opened again.
        run = LearningPair(target, lambda: draft, FAULTS if number % 2 else Faults(), draft_steps=8, seed=number).run(
            todo
        )
        assert run.tokens == Pair(target).run(todo).tokens
        accepted.append(run.accepted)
        settle(draft)  # it may have lost track of sessions that are over
        if number >= 4 and run.accepted > 0.6 * 6 * 40:
            break
    return draft, folder, accepted


@pytest.mark.long
def test_draft_improves_on_its_traffic(learnt):
    draft, _, accepted = learnt
    load = draft.load().online
    assert accepted[0] < 0.1 * 6 * 40
    assert accepted[-1] > 0.6 * 6 * 40, accepted
    assert draft.drafter.swaps == load.kept >= 1
    assert load.steps >= 12 * load.kept
    assert load.accept_length_after > 2.5  # of 3
    assert load.seconds > 0
    assert draft.load().compilations == 0  # at swaps, too; every run looks as well


def test_output_layer_stays_where_the_first_weights_know_the_token(learnt):
    """All others learn; entries of other tokens would, too."""
    learner = learnt[0].drafter.learner
    first, own = learner.judge.first.learnt, learner.averaged
    entries = {token: entry for entry, token in enumerate(first.ids.tolist())}
    places = [(entry, entries[token]) for entry, token in enumerate(learner.ids.tolist()) if token in entries]
    here, there = np.transpose(places)
    assert len(places) > 32
    np.testing.assert_allclose(own["head"][:, here], first.params["head"][:, there], rtol=1e-5)
    assert not np.allclose(own["norm"], first.params["norm"], rtol=1e-3)
    unknown = next(token for token in range(VOCAB) if token not in entries)
    ids = np.where(np.arange(64) < 60, first.ids, unknown)
    kept = learner.judge.with_first_output({"head": jax.numpy.ones_like(own["head"])}, ids)["head"]
    np.testing.assert_array_equal(kept[:, :60], first.params["head"][:, :60])
    np.testing.assert_array_equal(kept[:, 60:], 1)


def test_worse_weights_are_discarded(learnt, target):
    draft, _, _ = learnt
    learner, before = draft.drafter.learner, draft.load().online
    learner.worse, swaps = 0, draft.drafter.swaps
    rng = np.random.default_rng(0)

    def spoil(array):
        return np.asarray(array) + rng.standard_normal(array.shape).astype(np.float32)

    for look in range(1, 4):
        learner.train_from(jax.tree.map(spoil, learner.serving.learnt.params))
        learner.evaluate()
        assert learner.load().rejected == before.rejected + look
        assert learner.load().accept_length_after < learner.load().accept_length_before
    assert (learner.load().kept, learner.offer.take()) == (before.kept, None)
    # After several in a row it goes on from what serves.
    for a, b in zip(
        jax.tree.leaves(learner.trainer.state.params), jax.tree.leaves(learner.serving.learnt.params), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    todo = some_requests(50)
    run = Pair(target, lambda: draft, draft_steps=8).run(todo)
    assert run.tokens == Pair(target).run(todo).tokens
    assert run.accepted > 0.5 * 6 * 40
    assert draft.drafter.swaps == swaps


def test_diverged_training_restarts(learnt, caplog):
    draft, _, _ = learnt
    learner = draft.drafter.learner
    learner.train_from(jax.tree.map(lambda array: np.asarray(array) * np.nan, learner.serving.learnt.params))
    learner.sampler.epochs = 1e9
    learner.postpone_evaluation()
    assert learner.run_once() > 0
    assert "diverged" in caplog.text
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(learner.trainer.state.params))


def test_training_restarts_from_what_the_served_weights_are_a_part_of(learnt):
    draft, _, _ = learnt
    learner = draft.drafter.learner
    first, served = learner.judge.first.learnt.params, learner.serving.learnt.params
    learner.swap(learner.judge.between(learner.serving, 0.5))
    learner.restart()
    changed = 0.0
    for origin, expected, found in zip(*map(jax.tree.leaves, (first, served, learner.averaged)), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
        changed = max(changed, float(np.abs(np.asarray(expected) - np.asarray(origin)).max()))
    assert changed > 1e-3
    learner.swap(learner.judge.behind(learner.serving))
    learner.offer.take()


def test_swap_drops_prefixes_and_keeps_sessions(learnt, target):
    draft, _, _ = learnt
    drafter, learner = draft.drafter, draft.drafter.learner
    weights = learner.serving.learnt
    prompt = list(range(40, 80)) * 2
    Pair(target, lambda: draft, draft_steps=8).run([request(900, prompt, 0.0, 8)])
    assert len(drafter.prefix) >= 5

    class Swapping(Pair):
        """Weights with other predictions are installed in the middle of a session."""

        def _iterate(self, now):
            super()._iterate(now)
            if now == 4:
                assert drafter.prefix_kvs
                other = jax.tree.map(lambda array: -np.asarray(array), weights.params)
                learner.offer.put(learner.host.convert(weights._replace(params=other)))
            if now == 6:
                assert drafter.prefix.epoch == epoch + 1
                learner.offer.put(learner.host.convert(weights))

    epoch = drafter.prefix.epoch
    todo = [request(901, prompt, 0.0, 60), request(902, prompt, 1.0, 60)]
    run = Swapping(target, lambda: draft, draft_steps=8).run(todo)
    assert run.tokens == Pair(target).run(todo).tokens
    assert run.reopened == 0
    assert drafter.prefix.epoch == epoch + 2
    draft.check()


def test_salted_sessions_are_not_recorded(learnt, target):
    draft, _, _ = learnt
    buffer, todo = draft.drafter.learner.sampler.buffer, some_requests(70, count=2)
    known = buffer.learnt, buffer.bytes
    salts = ("mine", cache_salt_of("a caller", "mine"))
    isolated = [replace(request, cache_salt=salt) for request, salt in zip(todo, salts, strict=True)]
    Pair(target, lambda: draft, draft_steps=8).run(isolated)
    assert (buffer.learnt, buffer.bytes) == known
    assert own_salt(cache_salt_of("a caller", "")) == ""  # its key alone isolates no session from the learner


def test_states_that_arrive_with_the_end_are_recorded(learnt):
    """While drafting is paused, a session may open, end and get its features in one frame."""
    draft, _, _ = learnt
    buffer = draft.drafter.learner.sampler.buffer
    settle(draft)
    before = buffer.learnt, len(buffer.recent(held_out=True))
    rows = np.zeros((8, draft.drafter.received_row_bytes), np.uint8)
    for session_id in (960, 961):  # one of several is held back
        draft.open(replace(request(session_id, [40, 41, 42, 43], 0.0, 5), drafting_paused=True))
        commits = [
            Commit(session_id, 4, np.array([44, 45], np.uint32), 1, draft_budget=0),
            Commit(session_id, 6, np.array([46, 47, 48], np.uint32), 1, finish_reason=FinishReason.LENGTH),
        ]
        draft.receive([], commits)
        draft.receive_features([FeatureBlock(session_id, 0, rows[:5]), FeatureBlock(session_id, 5, rows[5:])])
        assert not draft.idle
        settle(draft)
    learnt_now = buffer.learnt - before[0] + 4 * (len(buffer.recent(held_out=True)) - before[1])
    assert learnt_now == 2 * 4  # all new tokens but the first
    draft.receive_features([FeatureBlock(960, 8, rows)])  # its session is closed
    draft.check()


def test_preempted_session_ends_its_recording(learnt):
    draft, _, _ = learnt
    drafter, buffer = draft.drafter, draft.drafter.learner.sampler.buffer
    rows = np.zeros((9, drafter.received_row_bytes), np.uint8)
    room = buffer.room
    draft.open(request(950, list(range(40, 60)), 0.0, 20))
    session = draft.running[950]
    session.features.add(0, rows)
    assert buffer.room < room
    drafter.close(session)
    session.features.give_up()
    drafter.open(session)
    session.features.add(9, rows)
    assert session.features.lost
    draft.close(950)
    draft.check()
    assert buffer.room == room


def test_trained_weights_are_written_and_resumed(models, learnt, target, tmp_path):
    first, folder, _ = learnt
    assert json.loads((folder / "config.json").read_text()) == json.loads((models[1] / "config.json").read_text())
    flags = {"online_output": str(folder), "max_running_requests": 1, "draft_dtype": "float32"}
    config = DraftConfig(
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(models[1]), model_path=str(models[0]),
        online=True, draft_max_total_tokens=2048, **flags,
    )  # fmt: skip
    again = build(config)[0]
    origins = [draft.drafter.learner.judge.first.learnt for draft in (first, again)]
    for a, b in zip(*map(jax.tree.leaves, origins), strict=True):  # the head that earlier traffic is held to
        np.testing.assert_array_equal(a, b)
    todo = some_requests(60, count=1)
    run = Pair(target, lambda: again, draft_steps=8)
    run.compiled = 10**6  # nothing is warmed up here
    run._audit = lambda: None
    assert run.run(todo).accepted > 0.5 * 40
    with pytest.raises(ConfigError, match="holds another draft"):
        build(DraftConfig(**{**config.__dict__, "speculative_draft_model_path": str(folder)}))


def test_origin_is_written_before_weights(tmp_path):
    """Otherwise a draft that was interrupted in between would refuse its own folder."""
    seen = []
    head = SimpleNamespace(publish=lambda params, ids, folder: seen.append((folder / ORIGIN).read_text()))
    weight_writer(head, tmp_path / "kept", "a draft")(NOTHING)
    assert seen == ["a draft\n"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("os error 28")])
def test_training_survives_failed_writes(tmp_path, caplog, error):
    def publish(*_):
        raise error

    weight_writer(SimpleNamespace(publish=lambda *_: None), tmp_path / "kept", "a draft")(NOTHING)
    weight_writer(SimpleNamespace(publish=publish), tmp_path / "kept", "a draft")(NOTHING)
    assert (tmp_path / "kept" / ORIGIN).read_text() == "a draft\n"
    assert "could not be written" in caplog.text
    assert str(error) in caplog.text


def test_training_thread_behind_a_gateway(models, learnt, tmp_path):
    """From initial weights again, while it serves; the text is that of the target alone."""
    drafter, learner = learnt[0].drafter, learnt[0].drafter.learner
    # A twin with the same text, but slowly enough for proposals to arrive in time.
    slow = write_tokenizer(write_cyclic_target(tmp_path / "slow", intermediate_size=16000))
    served = target_service(slow, f"unix:{tmp_path}/target", **VERIFY_ALL).start()
    served.pause = 0.01  # more of them do
    learner.serving = learner.judge.first
    learner.restart()
    learner.offer.put(learner.host.convert(learner.serving.learnt))
    kept = learner.load().kept
    draft = draft_service(f"unix:{tmp_path}/draft", drafter).start()
    gateway = Gateway(tmp_path, [served.address], [draft.address]).wait()
    rounds = []

    def ask(seed: int) -> float:
        before = accepted(gateway)
        rounds.append((seed, ask_all(gateway, max_tokens=60, temperature=seed % 2, seed=seed)))
        return accepted(gateway) - before

    try:
        unlearnt = ask(0)
        drafter.start()
        enough = max(60, 2 * unlearnt)  # of 240; on a busy machine many come late
        assert any(ask(seed) > enough for seed in range(1, 100))
        assert gateway.metric("outrider_online_kept_total") > kept
    finally:
        drafter.stop()
        gateway.stop()
        draft.stop()
    served.pause = 0.0
    alone = Gateway(tmp_path, [served.address]).wait()
    try:
        for seed, texts in (rounds[0], rounds[-1]):
            assert ask_all(alone, max_tokens=60, temperature=seed % 2, seed=seed) == texts
    finally:
        alone.stop()
        served.stop()


def test_training_pauses_without_new_rows(learnt):
    """Rows are used a limited number of times."""
    draft, _, _ = learnt
    learner = draft.drafter.learner
    learner.sampler.epochs = 0.5
    learner.postpone_evaluation()
    assert learner.run_once() == 0.0


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"speculative_algorithm": "NGRAM"}, "cannot train NGRAM"),
        ({"speculative_algorithm": "STANDALONE"}, "cannot train STANDALONE"),
        ({"draft_tp_size": 2}, "--draft-tp-size"), ({"draft_feature_dtype": "float8_e4m3"}, "--draft-feature-dtype"),
        ({"online_share": 0.0}, "--online-share"), ({"online_share": 0.95}, "--online-share"),
        ({"online_learning_rate": 0.0}, "--online-learning-rate"),
        ({"online_bytes": 1 << 20}, "--online-bytes 1048576 is too small .*; set 3145728"),
        ({"online": False, "online_output": "x"}, "needs --online"),
    ],
)  # fmt: skip
def test_invalid_flags_are_refused(models, flags, what):
    common = {"speculative_algorithm": "EAGLE3", "model_path": str(models[0]), "online": True}
    with pytest.raises(ConfigError, match=what):
        build(DraftConfig(**(common | {"speculative_draft_model_path": str(models[1])} | flags)))


def test_serve_passes_the_flags_on(tmp_path):
    config = ServeConfig()
    config = replace(config, draft=replace(config.draft, online=True, online_share=0.1, online_output="kept"))
    made = configure(config, CorePlan((0,), (0,), (0,)), tmp_path).draft
    assert (made.online, made.online_share, made.online_output) == (True, 0.1, "kept")


def test_metrics_of_online_training(learnt):
    from gateway.telemetry.metrics import Metrics
    from outrider.wire.codec import load_to_pb

    metrics, load = Metrics(), learnt[0].load()
    assert "online" not in metrics.render().decode().replace("# HELP outrider_online", "").replace(
        "# TYPE outrider_online", ""
    )
    metrics.services.update("draft", "here", load_to_pb(load))
    text = metrics.render().decode()
    assert f'outrider_online_steps_total{{address="here"}} {float(load.online.steps)}' in text
    assert f'outrider_online_kept_total{{address="here"}} {float(load.online.kept)}' in text
    assert 'outrider_online_accept_length_after{address="here"}' in text
