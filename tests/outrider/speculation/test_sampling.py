"""The sampling rules: each filter alone, all filters against the resulting distribution, and wrong values."""

import numpy as np
import pytest
from scipy import stats

from outrider.errors import InvalidRequest
from outrider.speculation.sampling import SamplingParams, StopConditions, filtered_log_probs, sample

P = np.array([0.35, 0.25, 0.15, 0.12, 0.08, 0.05])
LOGITS = np.log(P) + 3.0


def kept(**params):
    return np.flatnonzero(np.isfinite(filtered_log_probs(LOGITS, SamplingParams(**params)))).tolist()


def test_filters():
    assert kept() == [0, 1, 2, 3, 4, 5]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=100) == [0, 1, 2, 3, 4, 5]
    assert kept(top_p=0.5) == [0, 1]
    assert kept(top_p=0.3) == [0]
    assert kept(top_p=0.0) == kept(top_p=0.0, top_k=3) == [0]
    assert kept(min_p=0.4) == [0, 1, 2]
    assert kept(min_p=1.0) == [0]


def test_top_p_counts_the_mass_that_top_k_left():
    # Of the renormalised (.467, .333, .2) the first two hold .8 >= .79; jointly three would be kept.
    assert kept(top_k=3, top_p=0.79) == [0, 1]


def test_temperature_sharpens_before_the_filters():
    assert kept(temperature=0.25, top_p=0.8) == [0, 1]


def test_greedy_takes_the_first_of_equal_logits():
    assert sample(np.array([1.0, 3.0, 3.0]), SamplingParams(temperature=0.0), 5) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"top_k": 3, "top_p": 0.9}, {"min_p": 0.3}])
def test_samples_follow_the_filtered_distribution(params):
    log_p = filtered_log_probs(LOGITS, SamplingParams(**params))
    expected = np.exp(log_p) / np.exp(log_p).sum()
    draws = [sample(LOGITS, SamplingParams(seed=s, **params), t) for s in range(20) for t in range(500)]
    counts = np.bincount(draws, minlength=6)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert stats.chisquare(counts[possible], expected[possible] * counts.sum()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1),
     ("top_p", -0.1), ("top_p", 1.5),
     ("min_p", -0.1), ("min_p", 2.0), ("seed", -1), ("seed", 2**64), ("presence_penalty", 2.1),
     ("frequency_penalty", float("nan")), ("repetition_penalty", 0.0), ("repetition_penalty", 11.0),
     ("logit_bias", ((1, 101.0),)), ("logit_bias", ((1, 1.0), (1, 2.0))), ("logit_bias", ((-1, 1.0),)),
     ("logit_bias", ((1, float("nan")),)), ("logit_bias", tuple((i, 1.0) for i in range(1025)))],
)  # fmt: skip
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field


def test_stop_conditions():
    with pytest.raises(InvalidRequest):
        StopConditions(max_tokens=0)
    with pytest.raises(InvalidRequest):
        StopConditions(max_tokens=3, min_tokens=4)
    assert StopConditions(3, stop_token_ids=(7,)).stop_ids((1, 2)) == {1, 2, 7}
    assert StopConditions(3, stop_token_ids=(7,), ignore_eos=True).stop_ids((1, 2)) == {7}
