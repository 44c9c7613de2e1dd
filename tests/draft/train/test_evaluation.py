"""Evaluation of drafts: replay of answers, devices, other models, sharpening."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch

from outrider.errors import ConfigError
from services.draft.learning.algorithms.initial import initial_head
from services.draft.learning.records.store import Record
from services.draft.train import evaluate
from services.draft.train.evaluate import CHAIN, TREE, replay
from services.draft.train.temperature import best_factor
from tests.support.checkpoints.heads import eagle3, write_head
from tests.support.checkpoints.perfect import CYCLE, write_cyclic_target
from tests.support.draft.helpers import feature_engine
from tests.support.draft.training import head_of, target_of
from tests.support.tiny import VOCAB


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_perfect_head_has_perfect_score(perfect, shape):
    target, head, tokens, rows = perfect
    records = [Record(tokens, rows, 5, 5, temperature, 7) for temperature in (0.0, 1.0)]
    scores = replay("EAGLE3", head, target, records, shape)
    for score in scores.values():
        assert score.tokens == len(tokens) - 6
        assert score.accept_length == pytest.approx((len(tokens) - 6) / score.steps)
        assert score.steps == -(-(len(tokens) - 6) // 6)


def test_answers_longer_than_the_default_cache_are_replayed(perfect, monkeypatch):
    target, head, tokens, rows = perfect
    monkeypatch.setattr(evaluate, "_MIN_CACHE_TOKENS", 256)  # for a session and its nodes, and no more
    records = [Record(tokens, rows, 5, 5, 0.0, seed) for seed in range(4)]
    score = replay("EAGLE3", head, target, records, CHAIN)[0.0]
    assert score.tokens == 4 * (len(tokens) - 6)
    assert score.steps == 4 * -(-(len(tokens) - 6) // 6)


@pytest.mark.parametrize("kind", ["plain", "bias", "norm_before_fc", "fc_norm", "names"])
def test_published_head_is_replayed_with_its_training_features(tmp_path, kind):
    target = target_of(tmp_path / "target")
    options = {} if kind in ("plain", "names") else {kind: True}
    config, tensors = eagle3(target.folder, **options)
    width, rng = target.hidden_size, np.random.default_rng(1)
    more = {"bias": {"fc.bias": width}, "norm_before_fc": {"norm_before_fc.weight": 3 * width}}
    more["fc_norm"] = {f"fc_norm.{i}.weight": width for i in range(3)}
    tensors |= {name: rng.random(count).astype(np.float32) for name, count in more.get(kind, {}).items()}
    if kind == "names":
        whole = {"d2t", "t2d", "lm_head.weight"}
        tensors = {name if name in whole else f"model.{name}": tensor for name, tensor in tensors.items()}
    folder = write_head(tmp_path / "head", config, tensors)
    head = initial_head("EAGLE3", folder, target)
    states = 20 * np.random.default_rng(0).standard_normal((5, 4 * target.hidden_size)).astype(np.float32)
    engine = feature_engine("EAGLE3", folder, target.folder)
    found = evaluate.feature_function(engine.drafter, folder)(states)
    np.testing.assert_allclose(found, head.feature(head.params(), jnp.asarray(states)), rtol=1e-4, atol=1e-4)


def test_replay_uses_the_given_device(perfect):
    target, head, tokens, rows = perfect
    records = [Record(tokens, rows, 5, 5, 0.0, 7)]
    with pytest.raises(ConfigError, match="cpu:99"):  # there is one
        replay("EAGLE3", head, target, records, CHAIN, "cpu:99")
    publish = lambda factor, folder: shutil.copytree(head, folder, dirs_exist_ok=True)  # noqa: E731
    with pytest.raises(ConfigError, match="cpu:99"):
        best_factor("EAGLE3", publish, target, records, device="cpu:99")


def test_random_text_is_never_accepted(perfect):
    target, head, tokens, rows = perfect
    wrong = np.random.default_rng(0).permutation(np.setdiff1d(np.arange(VOCAB), CYCLE))[: len(tokens)]
    scores = replay("EAGLE3", head, target, [Record(wrong.astype(np.uint32), rows, 5, 5, 0.0, 7)], CHAIN)
    assert scores[0.0].accept_length < 1.2


def test_a_draft_of_another_model_is_refused(perfect, tmp_path):
    _, head, tokens, rows = perfect
    other = write_cyclic_target(tmp_path / "other", vocab=360)
    with pytest.raises(ConfigError, match="another target"):
        replay("EAGLE3", head, other, [Record(tokens, rows, 5, 5, 0.0, 7)], CHAIN)


def test_the_factor_with_the_longest_accept_length_is_chosen(perfect, tmp_path):
    """Only one of the drafts predicts anything."""
    target, head, tokens, rows = perfect

    def publish(factor, folder):
        tensors = safetensors.numpy.load_file(head / "model.safetensors")
        if factor != 1.2:
            tensors["lm_head.weight"] = -tensors["lm_head.weight"]
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        shutil.copy(head / "config.json", folder)

    factor, gains = best_factor("EAGLE3", publish, target, [Record(tokens, rows, 5, 5, 1.0, 7)])
    assert factor == 1.2
    assert gains[0] == 1
    assert max(gains) == gains[2] > 3


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3"])
def test_sharpening_scales_logits_alone(tmp_path, name):
    """A head matrix of the target stays as it is."""
    target = target_of(tmp_path / "target")
    algorithm, _, params = head_of(target, name=name)
    sharper = algorithm.sharpened(params, 1.5)
    if name == "EAGLE":
        assert sharper is None
        return
    np.testing.assert_allclose(algorithm.head(sharper), 1.5 * algorithm.head(params), rtol=1e-6)
    assert all(sharper[part] is params[part] for part in params if part != "head")
