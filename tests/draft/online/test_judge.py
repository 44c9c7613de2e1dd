"""The judge of new weights: better on recent sessions, and nearly as good as the first weights on earlier ones."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from services.draft.online.judge import Judge, Weights, is_better
from services.draft.online.swap import LearntWeights

FIRST, SERVED, NEW = 0.0, 0.3, 1.0
RECENT, EARLIER = "recent", "earlier"


def weights(value, ids=(0, 1, 2)):
    """Weights with a head of one row, and the target's map of five tokens."""
    ids = np.array(ids)
    known = np.full(5, -1)
    known[ids] = np.arange(len(ids))
    learnt = LearntWeights({"fuse": jnp.full(2, value), "head": value + 10.0 * jnp.asarray(ids)[None]}, ids)
    return Weights(learnt, SimpleNamespace(draft_ids=jnp.asarray(known)))


def judge(accepted, rows=200, earlier=200):
    """A judge whose weights accept given tokens on average. accepted: by traffic, a function of the weights' value."""
    batch = {RECENT: SimpleNamespace(kind=RECENT, reach=np.ones(rows))}
    batch[EARLIER] = SimpleNamespace(kind=EARLIER, reach=np.ones(earlier))
    found = Judge.__new__(Judge)
    found._sampler = SimpleNamespace(
        recent_held_out=lambda: [batch[RECENT]], earliest_held_out=lambda: [batch[EARLIER]]
    )
    found.first = weights(FIRST)

    def measured(of, batches):
        kind = batches[0].kind
        return np.arange(len(batches[0].reach)) % 3 + accepted.get(kind, lambda value: 0.0)(of.learnt.params["fuse"][0])

    found.accepted = measured
    return found


@pytest.mark.parametrize(
    ("recent", "earlier", "better", "worse", "part", "retained"),
    [
        (0.0, 0.0, False, False, 0.5, 1.0),
        (2.0, 0.0, True, False, 0.5, 1.0),
        (2.0, 0.1, True, False, 1.0, 1.05),  # better on both
        (-0.5, 0.0, False, True, 0.5, 1.0),
        # Of two tokens 0.04 may be lost.
        (4.0, -0.09, True, False, 0.4, 0.982),
        (2.0, -0.18, False, True, 0.2, 0.982),
        (2.0, -1.0, False, True, 0.1, 0.95),
    ],
)
def test_the_largest_part_of_the_way_that_keeps_earlier_traffic(recent, earlier, better, worse, part, retained):
    found = judge({RECENT: lambda value: recent * value, EARLIER: lambda value: earlier * value})
    verdict = found.verdict(weights(SERVED), weights(NEW))
    assert (verdict.better, verdict.worse, verdict.weights.part) == (better, worse, pytest.approx(part))
    assert verdict.retained == pytest.approx(retained, abs=2e-3)
    assert verdict.weights.learnt.params["fuse"][0] == pytest.approx(part)
    assert verdict.after == pytest.approx(2 + recent * part, abs=0.02)


def test_earlier_traffic_is_kept_beyond_chance():
    """As much on average, with differences of every row to both sides."""
    sides = np.tile([1.0, -1.0], 100)
    verdict = judge({RECENT: lambda value: 8.0 * value, EARLIER: lambda value: value * sides}).verdict(
        weights(0.1), weights(NEW)
    )
    assert (verdict.better, verdict.weights.part, verdict.retained) == (
        True,
        pytest.approx(0.5),
        pytest.approx(1.0, abs=1e-6),
    )


def test_entries_of_other_tokens_are_the_learnt_ones():
    """Entries are compared by token, wherever they are."""
    mixed = judge({}).between(weights(NEW, (2, 4, 0)), 0.25)
    assert mixed.learnt.ids.tolist() == [2, 4, 0]
    np.testing.assert_allclose(mixed.learnt.params["head"][0], [20.25, 41.0, 0.25])
    np.testing.assert_allclose(mixed.learnt.params["fuse"], 0.25)


def test_learnt_weights_are_had_back_from_those_that_serve():
    found, new = judge({}), weights(NEW, (2, 4, 0))
    for part in (1.0, 0.5, 0.1):
        behind = found.behind(found.between(new, part))
        assert behind.learnt.ids.tolist() == [2, 4, 0]
        for name, value in new.learnt.params.items():
            np.testing.assert_allclose(behind.learnt.params[name], value, rtol=1e-5)


def test_too_few_rows_give_no_verdict():
    assert judge({}, rows=60).verdict(weights(SERVED), weights(NEW)) is None
    assert judge({}, earlier=60).verdict(weights(SERVED), weights(NEW)).retained is None


def test_better_means_more_than_chance():
    one = np.array([0, 1, 2, 3] * 10)
    assert not is_better(one, one)
    assert is_better(one, one + 1)
    assert not is_better(one + 1, one)
    luck = one.copy()
    luck[:1] += 1
    assert not is_better(one, luck)
