"""The draft in training against the served draft: row for row, on true features and on its own."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from outrider.speculation.tree import ROOT
from services.draft.formats.decoders import read_decoder
from services.draft.formats.dflash import read_dflash
from services.draft.formats.eagle import read_eagle
from services.draft.formats.eagle3 import read_eagle3
from services.draft.formats.mtp import read_mtp
from services.draft.formats.target import read_target, target_logits
from services.draft.learning.algorithms.initial import initial_head
from services.draft.learning.objective import Objective
from services.draft.learning.records.batches import Batch, PackShape, build
from services.draft.learning.unroll import unroll
from services.draft.learning.unroll_block import unroll_block
from services.draft.model.layers.decoder import head as head_logits
from tests.support.checkpoints.mtp import write_mtp
from tests.support.draft.stepping import Stepper
from tests.support.draft.training import HIDDEN, head_of, random_record, shared_of, store_of, target_of
from tests.support.draft.twins.blocks import BlockTwin
from tests.support.tiny import VOCAB

UNROLL_STEPS = 4
READERS = {"EAGLE": read_eagle, "EAGLE3": read_eagle3, "NEXTN": read_mtp}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return target_of(tmp_path_factory.mktemp("target"))


def pack_of(folder, lengths=(14, 18), ids=None, states=4, uses_features=True):
    rng = np.random.default_rng(2)
    records = [random_record(rng, length, prompt=5, ids=ids, states=states) for length in lengths]
    reader = store_of(folder, records).read()
    shape = PackShape(1, 40, 32, UNROLL_STEPS, uses_features)
    return records, build(reader, [list(range(len(records)))], shape, np.random.default_rng(7))


def states_of(batch):
    return jnp.asarray(batch.states.astype(np.float32))


def steps_of(algorithm, params, shared, batch):
    """The unrolled steps of 32 rows each, from one program: operations by themselves are compiled one by one."""
    compute = partial(unroll, algorithm.model, batch=batch, counts=[32] * UNROLL_STEPS)
    return jax.jit(lambda *read: list(compute(*read)))(
        params, shared.embed, algorithm.feature(params, states_of(batch))
    )


def published(folder, family):
    """A checkpoint's own MTP layer: target, algorithm, ids, parameters, and the draft as it is served."""
    target = read_target(write_mtp(folder, family))
    algorithm = initial_head("NEXTN", folder, target)
    return target, algorithm, np.arange(VOCAB), algorithm.params(), read_mtp(folder, target)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "layers"),
    [("EAGLE3", 2), ("EAGLE", 2), ("NEXTN", 1), ("glm-4.5", 1), ("deepseek-v3", 1)],
)
def test_rows_are_those_of_the_draft_service(tmp_path, target, name, layers):
    if name in READERS:
        algorithm, ids, params = head_of(target, name=name, layers=layers)
        algorithm.publish(params, ids, tmp_path / "head")
        draft = READERS[name](tmp_path / "head", target)
        assert replace(draft.config, architecture="") == replace(algorithm.model, architecture="")
    else:
        target, algorithm, ids, params, draft = published(tmp_path / "target", name)
    assert draft.features.final == (name != "EAGLE3")
    served = draft.load(jnp.float32)
    records, batch = pack_of(tmp_path / "answers", states=len(algorithm.states.layers) + 1)

    shared = shared_of(target, ids)
    steps = steps_of(algorithm, params, shared, batch)
    head = {"head": params["head"] if name == "EAGLE3" else served["head"]}
    trained = np.stack([head_logits(head, step.state, 2**31 - 1)[0] for step in steps])

    places, compared = np.asarray(batch.rows[0]), 0
    for number, record in enumerate(records, start=1):
        feature = algorithm.feature(params, jnp.asarray(record.rows.view(ml_dtypes.bfloat16).astype(np.float32)))
        tokens = record.tokens.tolist()
        start = int(np.flatnonzero(batch.segments[0] == number)[0])
        for i in range(32):
            row = int(places[i]) - start
            if not batch.reach[0, i] or batch.segments[0, places[i]] != number or row % 3:
                continue
            # The draft service at the point where token row + 1 is the last committed one.
            model = Stepper(draft.config, served, tokens[: row + 2])
            logits = [model.run(40, feed=row + 1, features=np.asarray(feature[: row + 1]))[row]]
            node = ROOT
            for k in range(1, min(UNROLL_STEPS, int(batch.reach[0, i]))):
                model.session.grower.add(node, [tokens[row + 1 + k]], [-1], [-0.1])
                node = k - 1
                logits.append(model.run(4, nodes=(node,))[0])
            np.testing.assert_allclose(trained[: len(logits), i], logits, rtol=2e-4, atol=2e-4)
            compared += len(logits)
    assert compared >= 20


def test_rows_of_a_small_decoder_are_those_of_the_draft_service(tmp_path, target):
    algorithm, ids, params = head_of(target, name="STANDALONE", layers=2, hidden=32)
    algorithm.publish(params, ids, tmp_path / "draft")
    draft = read_decoder(tmp_path / "draft")
    assert draft.config == algorithm.model
    assert (tmp_path / "draft" / "tokenizer.json").is_file() == (target.folder / "tokenizer.json").is_file()
    records, batch = pack_of(tmp_path / "answers", states=1, uses_features=False)
    (steps,) = unroll(algorithm.model, params, params["embed"], None, batch, [32])
    trained = np.asarray(steps.state[0] @ params["embed"].T)
    served, compared = draft.load(jnp.float32), 0
    for number, record in enumerate(records, start=1):
        start = int(np.flatnonzero(batch.segments[0] == number)[0])
        tokens = record.tokens.tolist()
        logits = Stepper(draft.config, served, tokens).run(40, feed=len(tokens))
        for i in range(32):
            row = int(batch.rows[0, i]) - start
            if batch.reach[0, i] and batch.segments[0, batch.rows[0, i]] == number:
                np.testing.assert_allclose(trained[i], logits[row], rtol=2e-4, atol=2e-4)
                assert batch.tokens[0, steps.place[0, i]] == tokens[row + 1]
                compared += 1
    assert compared == sum(len(record.tokens) - 1 - record.first for record in records)


def test_counted_rows(tmp_path, target):
    """Rows whose text leaves the draft's vocabulary, and rows behind the end, do not count in the loss."""
    algorithm, ids, params = head_of(target)
    shared = shared_of(target, ids)
    objective = Objective(algorithm, UNROLL_STEPS, 1.0, mixed_precision=False)
    others = np.setdiff1d(np.arange(320), ids)[:12]
    records, batch = pack_of(tmp_path / "answers", ids=np.concatenate([ids, others]))
    _, tally = jax.jit(objective)(params, shared, batch)
    expected = np.zeros(UNROLL_STEPS)
    for record in records:
        tokens = record.tokens.tolist()
        for row in range(record.first - 1, len(tokens) - 2):
            for k in range(UNROLL_STEPS):
                if row + 2 + k >= len(tokens) or tokens[row + 2 + k] not in ids:
                    break
                expected[k] += 1
    assert 0 < expected[-1] < expected[0]
    np.testing.assert_array_equal(tally.counts, expected)


@pytest.mark.parametrize(("name", "factor", "cap"), [("EAGLE3", 1.0, None), ("EAGLE", 0.25, None), ("EAGLE", 2.0, 3.0)])
def test_the_loss_is_cross_entropy(tmp_path, monkeypatch, name, factor, cap):
    """Also where the target's head, whose logits have a factor or a softcap, reads the states."""
    target = target_of(tmp_path / "target")
    logits_of = {"logit_scale": factor, "final_logit_softcapping": cap}
    file = target.folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | logits_of))
    algorithm, ids, params = head_of(target, name=name)
    monkeypatch.setattr(algorithm, "state_loss_weight", 0.0)
    shared = shared_of(target, ids)
    records, batch = pack_of(tmp_path / "answers", ids=ids, states=len(algorithm.states.layers) + 1)
    objective = Objective(algorithm, UNROLL_STEPS, 1.0, False, *target_logits(target))
    total, tally = jax.jit(objective)(params, shared, batch)
    steps = steps_of(algorithm, params, shared, batch)
    head, expected = np.asarray(shared.head), np.zeros(UNROLL_STEPS)

    def log_softmax(x):
        x = x if cap is None else cap * np.tanh(x / cap)
        return x - np.log(np.exp(x - x.max()).sum()) - x.max()

    for row in range(32):
        segment = int(batch.segments[0, batch.rows[0, row]])
        final = records[segment - 1].rows.view(ml_dtypes.bfloat16)[:, -48:].astype(np.float32)
        position = int(batch.positions[0, batch.rows[0, row]])
        for k in range(min(UNROLL_STEPS, int(batch.reach[0, row]))):
            p = np.exp(log_softmax(factor * final[position + 1 + k] @ head))
            logits = head_logits({"head": head} | params, steps[k].state[0, row], 2**31 - 1)
            expected[k] -= p @ log_softmax(factor * np.asarray(logits))
    np.testing.assert_allclose(tally.losses, expected, rtol=1e-4)
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "granite", "cohere", "gemma2"])
def test_initial_head_equals_the_targets_head(tmp_path, family):
    """Some targets scale their logits, or have a softcap; norms of some multiply by 1 + weight."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.35,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
    }  # fmt: skip
    scales = {"granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.25}}
    config = transformers.AutoConfig.for_model(family, **sizes | scales.get(family, {}))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        steps = model(torch.arange(10, 30)[None], output_hidden_states=True)
    target, every = read_target(tmp_path), np.arange(VOCAB)
    states = np.concatenate([np.zeros((1, 20, 3 * HIDDEN), np.float32), steps.hidden_states[-1].numpy()], -1)
    algorithm, _, params = head_of(target, vocab=VOCAB)
    objective = Objective(algorithm, 2, 0.8, False, *target_logits(target))
    found = objective.target_distributions(shared_of(target, every), Batch(jnp.asarray(states), *[None] * 7))
    np.testing.assert_allclose(found, torch.softmax(steps.logits, -1).numpy(), rtol=1e-3, atol=1e-5)
    assert np.abs(params["norm"] - 1).max() < 0.01, "as the target's own norm, which has yet to learn"
    size = np.abs(params["head"]).mean() / np.abs(shared_of(target, every).head).mean()
    assert size == pytest.approx(0.3 * {"granite": 1 / 8, "cohere": 0.25}.get(family, 1), rel=0.01)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "mixed_precision", "cap"), [
    ("EAGLE3", False, None), ("EAGLE3", True, None), ("NEXTN", True, None),
    ("EAGLE", False, 2.0), ("DFLASH", False, None), ("STANDALONE", True, None),
])  # fmt: skip
def test_gradients_are_those_of_the_loss(tmp_path, name, mixed_precision, cap):
    """Against differences, along a random direction; in bfloat16 only roughly."""
    target = target_of(tmp_path / "target")
    file = target.folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"final_logit_softcapping": cap}))
    shape = {"block": 3, "layers": 1} if name == "DFLASH" else {}
    algorithm, ids, params = head_of(target, name=name, **shape)
    shared, uses_features = shared_of(target, ids), algorithm.model.head.uses_features
    states = len(algorithm.states.layers) + 1
    _, batch = pack_of(tmp_path / "answers", ids=ids, states=states, uses_features=uses_features)
    unroll_steps = algorithm.depth or UNROLL_STEPS
    objective = Objective(algorithm, unroll_steps, 0.8, mixed_precision)
    gradients = jax.jit(jax.grad(lambda p: objective(p, shared, batch)[0]))(params)
    exact = jax.jit(Objective(algorithm, unroll_steps, 0.8, mixed_precision=False))
    rng = np.random.default_rng(0)
    way = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32) * 0.02, params)
    step = 0.01

    def at(t):
        return float(exact(jax.tree.map(lambda x, w: x + t * w, params, way), shared, batch)[0])

    expected = (at(step) - at(-step)) / (2 * step)
    found = sum(float((s * w).sum()) for s, w in zip(jax.tree.leaves(gradients), jax.tree.leaves(way), strict=True))
    assert found == pytest.approx(expected, rel=0.1 if mixed_precision else 0.02)


def test_blocks_are_those_of_the_draft_service(tmp_path, target):
    """Every position of every row's block, against the published drafter's plain twin."""
    algorithm, ids, params = head_of(target, name="DFLASH", layers=2, block=UNROLL_STEPS + 1, aux_layers=(1, 3, 4))
    algorithm.publish(params, ids, tmp_path / "draft")
    draft = read_dflash(tmp_path / "draft", target)
    assert draft.config == algorithm.model
    assert draft.features == replace(algorithm.states, final=False)
    served = draft.load(jnp.float32)
    for name in ("norm", "context_norm"):
        np.testing.assert_array_equal(served[name], params[name])
    state, sharper = (
        algorithm.model.head.finish(p, jnp.ones(48))[0] for p in (params, algorithm.sharpened(params, 1.2))
    )
    np.testing.assert_allclose(sharper, 1.2 * state, rtol=1e-6)
    records, batch = pack_of(tmp_path / "answers")
    states, shared = states_of(batch), shared_of(target, ids)
    feature = algorithm.feature(params, states)
    compute = partial(unroll_block, algorithm.model, params, shared.embed, batch=batch, counts=[32, 20, 20, 9])
    steps = jax.jit(lambda feature: list(compute(feature)))(feature)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    tensors = safetensors.torch.load_file(tmp_path / "draft" / "model.safetensors")
    twin = BlockTwin(config, {name: tensor.float().numpy() for name, tensor in tensors.items()}, target.folder)
    seen = 0
    for i, place in enumerate(batch.rows[0].tolist()):
        if not batch.reach[0, i]:
            continue
        record = int(batch.segments[0, place]) - 1
        first = place - int(batch.positions[0, place])
        tokens, row = records[record].tokens.tolist(), place - first
        logits = twin.logits(tokens[row + 1], np.asarray(feature[0, first : place + 1]), UNROLL_STEPS + 1)
        for k, step in enumerate(steps):
            if i < step.state.shape[1]:
                found = twin.head.numpy() @ np.asarray(step.state[0, i], np.float64)
                np.testing.assert_allclose(found, logits[k], rtol=2e-3, atol=2e-3)
                assert step.place[0, i] == place + 1 + k
                seen += 1
    assert seen > 50
