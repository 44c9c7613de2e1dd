"""The draft's vocabulary follows the traffic, and what the training knows of the other entries stays."""

import jax.numpy as jnp
import numpy as np
import pytest

from services.draft.learning.optimize import TrainState
from services.draft.online.vocabulary import Exchange, exchange, exchanged_ids, exchanged_state, token_counts


@pytest.mark.parametrize(
    ("counts", "entries", "tokens"),
    [
        ({}, [], []),
        ({7: 1}, [], []),  # too rare
        ({7: 2}, [4], [7]),  # token 8 does not occur and has the greatest id
        ({7: 2, 9: 5, 8: 1}, [2, 1], [9, 7]),  # the most frequent first; 8 occurs, 5 is kept, then 3 and 2
        ({7: 2, 8: 1, 0: 1, 2: 1, 3: 1}, [], []),  # nothing to spare
    ],
)
def test_missing_tokens_take_the_places_of_unused_ones(counts, entries, tokens, monkeypatch):
    monkeypatch.setattr("services.draft.online.vocabulary._MAX_PART", 2)
    ids = np.array([0, 2, 3, 5, 8])
    answer = np.repeat(list(counts), list(counts.values())).astype(np.uint32)
    change = exchange(ids, token_counts([answer], 10), kept={5})
    assert (change.entries.tolist(), change.tokens.tolist()) == (entries, tokens)
    assert bool(change) == bool(entries)
    after = exchanged_ids(ids, change)
    assert len(set(after.tolist())) == len(ids)
    assert set(tokens) <= set(after.tolist())


def test_exchanged_columns_are_those_of_the_nearest_tokens_without_momentum(monkeypatch):
    monkeypatch.setattr("services.draft.online.vocabulary._NEAREST", 2)
    head = np.arange(15, dtype=np.float32).reshape(3, 5)
    moments = {"mu": {"head": jnp.ones((3, 5)), "other": jnp.ones((3, 5))}, "count": jnp.array(5)}
    state = TrainState({"head": jnp.asarray(head), "other": jnp.zeros((3, 5))}, moments)
    known = np.array([[1.0, 9.0, 2.0, 0.0, -1.0], [0.1, 9.0, 0.0, 3.0, 0.0]], np.float32)
    wanted = known.copy()
    wanted[:, 1] = 50.0, 1.0  # nearest to 0 and 2, whatever their sizes
    after = exchanged_state(state, Exchange(np.array([1]), np.array([60])), known, wanted)
    expected = head.copy()
    expected[:, 1] = (head[:, 0] + head[:, 2]) / 2
    np.testing.assert_array_equal(after.params["head"], expected)
    np.testing.assert_array_equal(after.moments["mu"]["head"], np.tile([1.0, 0.0, 1.0, 1.0, 1.0], (3, 1)))
    np.testing.assert_array_equal(after.moments["mu"]["other"], np.ones((3, 5)))
    assert int(after.moments["count"]) == 5
