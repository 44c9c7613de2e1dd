"""The head in training against the head as it is served: row for row, on true features and on its own."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from outrider.speculation.tree import ROOT
from services.draft.model.decoder import head as head_logits
from services.draft.model.formats.eagle3 import read_eagle3
from services.draft.train.batches import PackShape, build
from services.draft.train.objective import Objective
from services.draft.train.unroll import unroll
from tests.draft.stepping import Stepper
from tests.train.helpers import head_of, random_record, shared_of, store_of, target_of

AHEAD = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return target_of(tmp_path_factory.mktemp("target"))


def pack_of(folder, lengths=(14, 18), ids=None):
    rng = np.random.default_rng(2)
    records = [random_record(rng, length, prompt=5, ids=ids) for length in lengths]
    reader = store_of(folder, records).read()
    return records, build(reader, [list(range(len(records)))], PackShape(1, 40, 32, AHEAD), np.random.default_rng(7))


@pytest.mark.parametrize("shape", [{}, {"layers": 2}])
def test_rows_are_those_of_the_draft_service(tmp_path, target, shape):
    algorithm, ids, params = head_of(target, **shape)
    algorithm.publish(params, ids, tmp_path / "head")
    draft = read_eagle3(tmp_path / "head", target)
    assert draft.config == algorithm.model
    served = draft.load(jnp.float32)
    records, batch = pack_of(tmp_path / "answers")

    states = jnp.asarray(batch.states[..., :-48].astype(np.float32))
    shared = shared_of(target, ids)
    said = list(unroll(algorithm.model, params, shared.embed, algorithm.feature(params, states), batch, [32] * AHEAD))
    trained = np.stack([head_logits(params, ahead.state, 2**31 - 1)[0] for ahead in said])

    places, compared = np.asarray(batch.rows[0]), 0
    for number, record in enumerate(records, start=1):
        feature = record.rows.view(ml_dtypes.bfloat16)[:, :-48].astype(np.float32) @ np.asarray(params["fc"])
        tokens = record.tokens.tolist()
        start = int(np.flatnonzero(batch.segments[0] == number)[0])
        for i in range(32):
            row = int(places[i]) - start
            if not batch.reach[0, i] or batch.segments[0, places[i]] != number or row % 3:
                continue
            # The draft service at the point where token row + 1 is the last committed one.
            model = Stepper(draft.config, served, tokens[: row + 2])
            logits = [model.run(40, feed=row + 1, features=feature[: row + 1])[row]]
            node = ROOT
            for k in range(1, min(AHEAD, int(batch.reach[0, i]))):
                model.session.add(node, [tokens[row + 1 + k]], [-1], [-0.1])
                node = k - 1
                logits.append(model.run(4, nodes=(node,))[0])
            np.testing.assert_allclose(trained[: len(logits), i], logits, rtol=2e-4, atol=2e-4)
            compared += len(logits)
    assert compared >= 20


def test_what_counts(tmp_path, target):
    """Rows whose text leaves the head's vocabulary, and those behind the end, have no part in the loss."""
    algorithm, ids, params = head_of(target)
    shared = shared_of(target, ids)
    objective = Objective(algorithm, AHEAD, 1.0, narrow=False)
    others = np.setdiff1d(np.arange(320), ids)[:12]
    records, batch = pack_of(tmp_path / "answers", ids=np.concatenate([ids, others]))
    _, tally = objective(params, shared, batch)
    expected = np.zeros(AHEAD)
    for record in records:
        tokens = record.tokens.tolist()
        for row in range(record.first - 1, len(tokens) - 2):
            for k in range(AHEAD):
                if row + 2 + k >= len(tokens) or tokens[row + 2 + k] not in ids:
                    break
                expected[k] += 1
    assert 0 < expected[-1] < expected[0]
    np.testing.assert_array_equal(tally.counts, expected)


def test_the_loss_is_cross_entropy(tmp_path, target):
    algorithm, ids, params = head_of(target)
    shared = shared_of(target, ids)
    records, batch = pack_of(tmp_path / "answers", ids=ids)
    total, tally = Objective(algorithm, AHEAD, 1.0, narrow=False)(params, shared, batch)
    states = jnp.asarray(batch.states[..., :-48].astype(np.float32))
    said = list(unroll(algorithm.model, params, shared.embed, algorithm.feature(params, states), batch, [32] * AHEAD))
    head, expected = np.asarray(shared.head), np.zeros(AHEAD)

    def log_softmax(x):
        return x - np.log(np.exp(x - x.max()).sum()) - x.max()

    for row in range(32):
        segment = int(batch.segments[0, batch.rows[0, row]])
        final = records[segment - 1].rows.view(ml_dtypes.bfloat16)[:, -48:].astype(np.float32)
        position = int(batch.positions[0, batch.rows[0, row]])
        for k in range(min(AHEAD, int(batch.reach[0, row]))):
            p = np.exp(log_softmax(final[position + 1 + k] @ head))
            expected[k] -= p @ log_softmax(np.asarray(head_logits(params, said[k].state[0, row], 2**31 - 1)))
    np.testing.assert_allclose(tally.losses, expected, rtol=1e-4)
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-4)


@pytest.mark.parametrize("narrow", [False, True])
def test_slopes_are_those_of_the_loss(tmp_path, target, narrow):
    """Against differences, along a random direction; in bfloat16 only roughly."""
    algorithm, ids, params = head_of(target)
    shared = shared_of(target, ids)
    _, batch = pack_of(tmp_path / "answers", ids=ids)
    objective = Objective(algorithm, AHEAD, 0.8, narrow)
    slopes = jax.jit(jax.grad(lambda p: objective(p, shared, batch)[0]))(params)
    exact = jax.jit(Objective(algorithm, AHEAD, 0.8, narrow=False))
    rng = np.random.default_rng(0)
    way = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32) * 0.02, params)
    step = 0.01

    def at(t):
        return float(exact(jax.tree.map(lambda x, w: x + t * w, params, way), shared, batch)[0])

    expected = (at(step) - at(-step)) / (2 * step)
    found = sum(float((s * w).sum()) for s, w in zip(jax.tree.leaves(slopes), jax.tree.leaves(way), strict=True))
    assert found == pytest.approx(expected, rel=0.1 if narrow else 0.02)
