"""The judge of new weights: better on recent sessions, and nearly as good as the first weights on earlier ones."""

from types import SimpleNamespace

import numpy as np
import pytest

from services.draft.online.judge import Judge, is_better

FIRST, SERVED, NEW = "first", "served", "new"
RECENT, EARLIER = "recent", "earlier"


def judge(accepted, rows=200):
    """A judge whose weights accept given tokens on average. accepted: by weights and traffic."""
    batch = {kind: [SimpleNamespace(kind=kind, reach=np.ones(rows))] for kind in (RECENT, EARLIER)}
    sampler = SimpleNamespace(recent_held_out=lambda _: batch[RECENT], replayed_held_out=lambda: batch[EARLIER])
    found = Judge.__new__(Judge)
    found._sampler, found.first = sampler, FIRST
    spread = np.arange(rows) % 3
    found.accepted = lambda weights, batches: spread + accepted.get((weights, batches[0].kind), 0.0)
    return found


@pytest.mark.parametrize(
    ("accepted", "better", "worse", "retained"),
    [
        ({}, False, False, None),
        ({(NEW, RECENT): 0.5}, True, False, 1.0),
        ({(SERVED, RECENT): 0.5}, False, True, None),
        ({(NEW, RECENT): 0.5, (NEW, EARLIER): -0.02}, True, False, 0.99),
        ({(NEW, RECENT): 0.5, (NEW, EARLIER): -0.2}, False, False, 0.9),
        # Each exchange loses little: the first weights count, not the served ones.
        ({(NEW, RECENT): 0.5, (NEW, EARLIER): -0.2, (SERVED, EARLIER): -0.18}, False, False, 0.9),
    ],
)
def test_new_weights_must_be_better_and_forget_little(accepted, better, worse, retained):
    verdict = judge(accepted).verdict(SERVED, NEW)
    assert (verdict.better, verdict.worse) == (better, worse)
    assert verdict.retained == (None if retained is None else pytest.approx(retained, abs=1e-2))


def test_too_few_rows_give_no_verdict():
    assert judge({}, rows=60).verdict(SERVED, NEW) is None


def test_better_means_more_than_chance():
    one = np.array([0, 1, 2, 3] * 10)
    assert not is_better(one, one)
    assert is_better(one, one + 1)
    assert not is_better(one + 1, one)
    luck = one.copy()
    luck[:1] += 1
    assert not is_better(one, luck)
