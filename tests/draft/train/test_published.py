"""Published heads in further training: the fusion is the target's, the folder keeps its tensors, weights fit."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from outrider.config import DraftConfig, TargetConfig
from outrider.errors import ConfigError
from outrider.serving.features import FeatureFormat, decode
from services.draft.formats.eagle import read_eagle
from services.draft.formats.eagle3 import read_eagle3
from services.draft.formats.mtp import read_mtp
from services.draft.formats.target import read_target
from services.draft.learning.algorithms.initial import initial_head, published_head
from services.draft.learning.objective import Objective
from services.draft.learning.records.batches import PackShape
from services.draft.learning.records.batches import build as build_batch
from services.draft.learning.records.store import Record
from services.draft.online.options import OnlineOptions
from services.draft.online.replay_buffer import Segments
from services.draft.online.setup import OnlineSetup
from services.draft.online.swap import WeightFormat
from services.draft.process.app import build
from services.draft.sessions.batch import StepShape, empty_inputs
from tests.support.checkpoints.heads import DIM, eagle, eagle3, write_head
from tests.support.checkpoints.mtp import PREFIXES, write_mtp
from tests.support.draft.helpers import feature_engine
from tests.support.tiny import write_model

H = 48


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("target"), num_hidden_layers=8)


def norms_of(rng, count, width=H, name="fc_norm.{}.weight"):
    return {name.format(i): 1 + 0.1 * rng.standard_normal(width).astype(np.float32) for i in range(count)}


def head_of(kind, target, folder):
    """A published head of a kind. Returns its folder."""
    rng = np.random.default_rng(3)
    if kind.startswith("eagle 1"):
        return write_head(folder, *eagle(target, bias="bias" in kind, layers=2, qkv_bias="bias" in kind))
    layer_ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    config, tensors = eagle3(target, layers=2 if "layers" in kind else 1, eagle_config=layer_ids)
    if "each" in kind:
        tensors |= norms_of(rng, 3)
    if "whole" in kind:
        tensors |= norms_of(rng, 1, 3 * H, "input_norm.weight")
        config |= {"norm_before_fc": True}
    if "bias" in kind:
        tensors["fc.bias"] = rng.standard_normal(H).astype(np.float32)
        config |= {"bias": True}
    if "qk" in kind:
        names = [f"{layer}.self_attn.{name}_norm.weight" for layer in ("midlayer", "layers.1") for name in "qk"]
        tensors |= dict.fromkeys(names, np.full(DIM, 1.5, np.float32))
    return write_head(folder, config, tensors)


KINDS = ["eagle 1", "eagle 1, bias", "eagle 3", "eagle 3, each, bias", "eagle 3, whole", "eagle 3, qk, layers"]


def read(folder, target):
    facts = read_target(target)
    draft = (read_eagle if "eagle 1" in folder.name else read_eagle3)(folder, facts)
    return draft, published_head(folder, facts, draft)


@pytest.fixture(params=KINDS)
def head(request, target, tmp_path):
    folder = head_of(request.param, target, tmp_path / request.param)
    return folder, *read(folder, target)


def test_feature_equals_that_of_the_target(head, target):
    import torch

    from services.target.features.fusion import Fusion
    from services.target.model.loading.load import load

    _, draft, served = head
    model = load(target, TargetConfig(model_path=str(target), device="cpu", dtype="float32"))
    spec = draft.features.in_format(FeatureFormat.FLOAT32)
    fusion = Fusion(replace(spec, layers=served.states.layers), draft.fusion, model)
    rng = np.random.default_rng(1)
    states = rng.standard_normal((5, (len(served.states.layers) + 1) * H)).astype(np.float32)
    own = states[:, : len(fusion.layers) * H + fusion.final * H] if not fusion.final else states[:, -H:]
    expected = decode(fusion.apply(torch.from_numpy(own)).numpy(), FeatureFormat.FLOAT32)
    feature = served.feature(served.params(), jnp.asarray(states))
    np.testing.assert_allclose(feature, expected, rtol=2e-4, atol=2e-4)


def test_published_head_is_read_as_trained(head, target, tmp_path):
    folder, draft, served = head
    rng = np.random.default_rng(2)
    learnt = jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) + rng.standard_normal(x.shape), jnp.bfloat16).astype(jnp.float32),
        served.params(),
    )
    kept = tmp_path / f"kept {folder.name}"
    served.publish(learnt, np.zeros(0, np.int64), kept)
    again, served_again = read(kept, target)
    assert again.config == draft.config
    assert again.features == draft.features
    found = served_again.params()
    assert jax.tree.structure(found) == jax.tree.structure(learnt)
    jax.tree.map(np.testing.assert_array_equal, found, learnt)
    one, two = (safetensors.numpy.load_file(path / "model.safetensors") for path in (folder, kept))
    assert {name: tensor.shape for name, tensor in one.items()} == {n: t.shape for n, t in two.items()}
    for name in ("d2t", "t2d"):
        if name in one:
            np.testing.assert_array_equal(one[name], two[name])
    assert json.loads((folder / "config.json").read_text()) == json.loads((kept / "config.json").read_text())


@pytest.mark.parametrize(
    "kind", ["eagle 1, bias", "eagle 3, whole, bias, qk, layers", "mimo", "glm-4.5", "deepseek-v3"]
)
def test_every_weight_is_trained(kind, target, tmp_path):
    """And no other parameter."""
    if kind in PREFIXES:
        folder = target = write_mtp(tmp_path / "model", kind)
        draft = read_mtp(folder, read_target(folder))
    else:
        folder = head_of(kind, target, tmp_path / kind)
        draft, _ = read(folder, target)
    facts = read_target(target)
    setup = OnlineSetup(OnlineOptions(length=64, context=16), folder, facts, draft, folder, draft)
    served = draft.load(jnp.float32)
    weight_format = WeightFormat(jnp.float32, None, panels=False)
    assert jax.tree.structure(setup.serve(served, weight_format).params) == jax.tree.structure(served)
    (weights,), rng = setup.targets(setup.head.target_ids(served)), np.random.default_rng(0)
    width = setup.buffer.row_bytes // 2
    assert width == (len(setup.head.states.layers) + 1) * facts.hidden_size
    tokens = rng.choice(np.flatnonzero(weights.draft_ids >= 0), 40).astype(np.uint32)
    rows = rng.standard_normal((39, width)).astype(jnp.bfloat16).view(np.uint8)
    batch = build_batch(Segments([Record(tokens, rows, 4, 4, 0.0, 0)], 2 * width), [[0]], PackShape(1, 64, 32, 1), rng)
    objective = Objective(setup.head, 1, 0.8, mixed_precision=True)
    gradients_of = jax.jit(jax.value_and_grad(lambda params: objective(params, weights, batch)[0]))
    loss, gradients = gradients_of(setup.head.params())
    assert np.isfinite(loss)
    chooses = "router_bias"  # which experts, not what they weigh
    assert all(
        np.abs(leaf).max() > 0 for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)
        if path[-1].key != chooses
    )  # fmt: skip


FORMATS = {
    "float32": {"draft_dtype": "float32", "draft_attention_backend": "plain"},
    "panels": {"draft_dtype": "bfloat16", "draft_attention_backend": "cpu"},
    "int8": {"draft_attention_backend": "plain", "speculative_draft_model_quantization": "int8"},
    "int8 panels": {"draft_attention_backend": "cpu", "speculative_draft_model_quantization": "int8"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "layout"), [("eagle 1, bias", "int8 panels"), *(("eagle 3, each, bias", layout) for layout in FORMATS)]
)
def test_a_swap_compiles_nothing(kind, layout, target, tmp_path):
    from services.draft.kernels.cpu import library

    if "panels" in layout and not library.available():
        pytest.skip("the compiled kernels do not run here")
    folder = head_of(kind, target, tmp_path / "head")
    flags = {"online": True, "max_running_requests": 1, "draft_feature_dtype": "auto"} | FORMATS[layout]
    engine = feature_engine("EAGLE" if "1" in kind else "EAGLE3", folder, target, **flags)
    drafter, runner = engine.drafter, engine.drafter.runner
    learner = drafter.learner
    served = learner.serving.learnt
    learner.host.convert(served)  # as in the warm-up
    shape = StepShape(1, 4, 4)
    runner.warm_up([shape])
    inputs = empty_inputs(runner.layout(shape))
    inputs.features.rows[:] = np.random.default_rng(0).standard_normal(inputs.features.rows.shape)
    inputs.temperature[:] = 0

    def outputs(given):
        inputs.features.given[:] = given
        return [part.copy() for part in runner.run(shape, inputs)]

    before = outputs(1)
    rng = np.random.default_rng(1)
    other = jax.tree.map(lambda x: np.asarray(x) + rng.standard_normal(x.shape).astype(np.float32), served.params)
    for params, same in ((other, False), (served.params, True)):
        learner.offer.put(learner.host.convert(served._replace(params=params)))
        drafter.work()
        after = outputs(1)
        outputs(0)
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)) == same
    assert drafter.swaps == 2
    assert runner.compilations.while_serving == 0


# --- what cannot learn ---


def test_untrainable_heads_are_refused(target, tmp_path):
    flags = {"online": True, "max_running_requests": 1}
    config, tensors = eagle3(target, vocab=None)
    with pytest.raises(ConfigError, match=r"no lm_head\.weight"):
        feature_engine("EAGLE3", write_head(tmp_path / "a", config, tensors), target, **flags)
    model = write_mtp(tmp_path / "b", "mimo-v2")
    with pytest.raises(ConfigError, match="dense layers with plain attention"):
        build(DraftConfig(speculative_algorithm="NEXTN", model_path=str(model), **flags))


@pytest.mark.parametrize("family", ["mimo", "glm-4.5", "deepseek-v3"])
def test_an_mtp_layer_is_written_back_as_it_was_published(family, tmp_path):
    """Untrained it is the same in bfloat16; trained weights are read as they were learnt; other tensors stay out."""
    folder = write_mtp(tmp_path / "model", family)
    target = read_target(folder)
    head = initial_head("NEXTN", folder, target)
    first = safetensors.numpy.load_file(folder / "model.safetensors")
    copies = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's
    layer = {n: tensor for n, tensor in first.items() if n.startswith(PREFIXES[family]) and not n.endswith(copies)}

    def published(params, name):
        head.publish(jax.tree.map(np.asarray, params), np.zeros(0, np.int64), tmp_path / name)
        return safetensors.numpy.load_file(tmp_path / name / "model.safetensors")

    same = published(head.params(), "same")
    assert {name: tensor.shape for name, tensor in same.items()} == {n: t.shape for n, t in layer.items()}
    for name, tensor in layer.items():
        expected = tensor if "bias" in name and "score" in name else tensor.astype(jnp.bfloat16)
        np.testing.assert_array_equal(same[name].astype(np.float32), expected.astype(np.float32))
    rng = np.random.default_rng(2)
    learnt = jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) + rng.standard_normal(x.shape), jnp.bfloat16).astype(jnp.float32),
        head.params(),
    )
    published(learnt, "learnt")
    again = initial_head("NEXTN", tmp_path / "learnt", target)
    assert again.model == head.model
    found = again.params()
    assert jax.tree.structure(found) == jax.tree.structure(learnt)
    jax.tree.map(np.testing.assert_array_equal, found, learnt)
    assert json.loads((tmp_path / "learnt" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    read_again = read_mtp(tmp_path / "learnt", target)
    assert not read_again.shared.keys() & layer.keys(), "its layer is its own"
