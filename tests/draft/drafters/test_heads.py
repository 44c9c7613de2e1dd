"""EAGLE and EAGLE-3 heads in JAX against a NumPy twin: prefill, the tree on own features, commits, corrections."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from outrider.speculation.tree import ROOT
from services.draft.formats.eagle import read_eagle
from services.draft.formats.eagle3 import read_eagle3
from services.draft.formats.target import read_target
from tests.support.checkpoints.heads import MAKERS, write_head
from tests.support.draft.stepping import Stepper
from tests.support.draft.twins.heads import Twin
from tests.support.tiny import VOCAB, write_model


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("target"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tied_target(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


HEADS = {
    "eagle": ("EAGLE", {}),
    "eagle, llama 3": ("EAGLE", {"bias": False, "rope_theta": 500.0}),
    "eagle, qwen2, old keys": (
        "EAGLE", {"qkv_bias": True, "rope_theta": "absent", "max_position_embeddings": "absent"},
    ),
    "eagle, two layers": ("EAGLE", {"layers": 2}),
    "eagle 3": ("EAGLE3", {}),
    "eagle 3, two layers": ("EAGLE3", {"layers": 2, "rope_theta": 1e6}),
    "eagle 3, own width": ("EAGLE3", {"hidden": 32}),
    "eagle 3, residual after norm": ("EAGLE3", {"norm_before_residual": True}),
    "eagle 3.1": ("EAGLE3", {"norm_output": True}),
    "eagle 3, target's head": ("EAGLE3", {"vocab": None}),
}  # fmt: skip


def build(kind, folder, target):
    return {"EAGLE": read_eagle, "EAGLE3": read_eagle3}[kind](folder, read_target(target))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("scaling", "factor"), [({"logits_scaling": 8.0}, 1 / 8), ({"logit_scale": 0.25}, 0.25)])
def test_eagle_logits_use_the_targets_factor(tmp_path, scaling, factor):
    """Some targets scale their logits. A norm or matrix of the head's own was trained with the scale."""
    target = write_model(tmp_path / "target", tie_word_embeddings=False)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | scaling))
    tokens = [5, 6, 7, 8]
    for kind, own in (("EAGLE", factor), ("EAGLE3", 1.0)):
        config, tensors = MAKERS[kind](target)
        draft = build(kind, write_head(tmp_path / kind, config, tensors), target)
        features = np.random.default_rng(1).standard_normal((3, draft.config.hidden_size)).astype(np.float32)
        model = Stepper(draft.config, draft.load(jnp.float32), tokens)
        found = model.run(4, feed=3, features=features)[:3]
        close(found, own * Twin.of(kind, config, tensors, target).logits(tokens, features))


@pytest.mark.parametrize(("change", "cap"), [({"final_logit_softcapping": 2.0}, 2.0), ({"model_type": "gemma2"}, 30.0)])
def test_eagle_logits_use_the_targets_softcap(tmp_path, change, cap):
    """A matrix of the head's own was trained without it."""
    target = write_model(tmp_path / "target", tie_word_embeddings=False)
    heads = [("EAGLE", *MAKERS["EAGLE"](target)), ("EAGLE3", *MAKERS["EAGLE3"](target))]
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    tokens = [5, 6, 7, 8]
    for kind, config, tensors in heads:
        draft = build(kind, write_head(tmp_path / kind, config, tensors), target)
        features = 60 * np.random.default_rng(1).standard_normal((3, draft.config.hidden_size)).astype(np.float32)
        model = Stepper(draft.config, draft.load(jnp.float32), tokens)
        found = model.run(4, feed=3, features=features)[:3]
        plain = Twin.of(kind, config, tensors, target).logits(tokens, features)
        assert np.abs(plain).max() > cap / 3, "the bound is felt"
        close(found, cap * np.tanh(plain / cap) if kind == "EAGLE" else plain)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", HEADS)
def test_head_equals_the_formulas(tmp_path, target, name):
    kind, options = HEADS[name]
    config, tensors = MAKERS[kind](target, **options)
    draft = build(kind, write_head(tmp_path / "head", config, tensors), target)
    twin = Twin.of(kind, config, tensors, target)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, 24).tolist()
    features = rng.standard_normal((40, draft.config.hidden_size)).astype(np.float32)
    model = Stepper(draft.config, draft.load(jnp.float32), tokens)

    # Prefill, in pieces as they come.
    whole = twin.logits(tokens, features)
    for feed in (5, 1, 16, 1):
        start = model.prefix_kv.settled
        close(model.run(16, feed=feed, features=features[start : start + feed])[:feed], whole[start : start + feed])

    # A tree on the head's own features.
    def expand(nodes, true):
        logits = model.run(4, nodes=tuple(nodes))
        for i, node in enumerate(nodes):
            path = model.session.tokens.tolist() + model.session.tree.path_tokens(node)
            close(logits[i], twin.logits(path, features[:true])[-1])

    model.session.grower.add(ROOT, [5, 6, 7], [-1, -1, -1], [-0.1, -1.0, -2.0])
    expand([0, 1, 2], 23)
    model.session.grower.add(0, [8, 9], [-1, -1], [-0.1, -1.0])
    model.session.grower.add(1, [8], [-1], [-0.1])
    expand([3, 5], 23)
    model.session.grower.add(3, [9, 4], [-1, -1], [-0.1, -1.0])
    expand([6, 4], 23)

    # Committed nodes' rows are provisional; what is below them grows on, also while they move.
    model.commit([5, 8])
    assert (model.prefix_kv.settled, model.prefix_kv.computed) == (23, 25)
    model.session.grower.add(1, [3], [-1], [-0.1])
    model.session.grower.add(ROOT, [12], [-1], [-0.1])
    expand([1, 3], 23)
    model.session.grower.add(3, [17], [-1], [-0.1])
    expand([4], 23)

    # The true features have come: rows are computed again, and the tree begins anew.
    model.session.regrow()
    model.prefix_kv.forget_provisional()
    close(model.run(4, feed=2, features=features[23:25])[:2], twin.logits(model.session.tokens, features)[23:25])
    model.session.grower.add(ROOT, [9], [-1], [-0.1])
    expand([0], 25)
    assert model.prefix_kv.free_slots == 64 - 1
