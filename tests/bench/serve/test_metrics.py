"""Figures from outcomes with known times."""

import pytest

from bench.serve.metrics import (
    Speculation,
    by_category,
    distribution,
    errors,
    meets,
    per_position,
    seconds_of,
    speculation,
    summarize,
    tokens_over_time,
)
from bench.serve.outcome import Outcome


def answered(category="x", due=0.0, pieces=(1.0, 2.0, 4.0), tokens=7, **options):
    facts = {"prompt_tokens": 5, "counted": True, "ended": pieces[-1] + 0.5, "streamed": True} | options
    return Outcome(category, due=due, sent=due, pieces=list(pieces), texts=["?"] * len(pieces), output_tokens=tokens,
                   **facts)  # fmt: skip


def test_latencies_start_at_the_due_time():
    outcome = answered(due=0.25)
    assert outcome.ttft == 0.75
    assert outcome.latency == 3.75
    assert outcome.tpot == 3.0 / 6
    assert outcome.gaps == [1.0, 2.0]
    assert answered(pieces=(1.0,), tokens=1).tpot is None
    assert answered(streamed=False).ttft is None


def test_summary_excludes_failures():
    failed = answered(tokens=100, error="HTTP 500", detail="oh")
    outcomes = [answered(), answered(due=1.0, pieces=(2.0, 3.0), tokens=3, counted=False), failed]
    summary = summarize(outcomes, seconds=5.0, limits={"ttft": 1.0, "e2el": 3.0})
    assert (summary.requests, summary.failed, summary.uncounted) == (2, 1, 1)
    assert (summary.input_tokens, summary.output_tokens) == (10, 10)
    assert summary.output_tokens_per_s == 2.0
    assert summary.requests_per_s == 0.4
    assert summary.tokens_per_piece == 2.0
    assert summary.ttft.mean == 1.0
    assert summary.itl.count == 3
    assert summary.itl.largest == 2.0
    assert summary.goodput == 0.2, "the first took 4 s in all"
    assert errors(outcomes) == {"HTTP 500": (1, "oh")}
    assert seconds_of(outcomes) == 4.5


def test_summary_of_failures_only():
    summary = summarize([Outcome("x", error="timeout")], 1.0)
    assert (summary.requests, summary.failed, summary.ttft, summary.speculation) == (0, 1, None, None)
    assert tokens_over_time([Outcome("x", error="timeout")], 4) == ([], [])
    assert seconds_of([]) == 0.0


def test_percentiles():
    taken = distribution([float(i) for i in range(101)])
    assert (taken.mean, taken.median, taken.p90, taken.p99, taken.largest) == (50, 50, 90, 99, 100)
    assert distribution([]) is None


def test_goodput_of_a_single_token():
    assert meets(answered(pieces=(1.0,), tokens=1), {"tpot": 0.001})
    assert not meets(answered(), {"tpot": 0.4})


def test_figures_by_category():
    outcomes = [answered("b", drafted=8, accepted=3), answered("a"), answered("b", drafted=4, accepted=0)]
    found = by_category(outcomes, 5.0)
    assert list(found) == ["b", "a"]
    assert found["a"].speculation is None
    assert found["b"].speculation == Speculation(14 / 11, 0.25, source="answers")


def test_acceptance_by_position():
    """Of 10 steps 4 accepted nothing, 3 one token, 2 two, 1 three."""
    outcomes = [
        answered(drafted=8, accepted=3, histogram=[3, 2, 1]),
        answered(drafted=8, accepted=7, histogram=[1, 1, 1, 1]),
        answered(drafted=0, accepted=0),
    ]
    assert speculation(outcomes).per_position == (0.6, 0.3, 0.1)
    assert per_position([]) == per_position([[], [0, 0]]) == ()


def test_no_speculation_without_draft_tokens():
    assert speculation([answered(drafted=0, accepted=0), answered()]) is None


def test_tokens_over_time_sum_to_the_total():
    outcomes = [answered(), answered(pieces=(1.5, 3.9), tokens=8)]
    begins, rates = tokens_over_time(outcomes, 9)
    assert begins[:2] == [0.0, 0.5]
    assert sum(rate * 0.5 for rate in rates) == pytest.approx(15)
    assert rates[3] == pytest.approx(4 / 0.5), "the half second after 1.5 has one piece of four tokens"


def test_answers_without_streaming_have_no_tpot():
    whole = answered(streamed=False)
    assert whole.tpot is None
    assert answered(pieces=(1.0,), tokens=3).tpot is None, "all came at once"
    summary = summarize([whole], 5.0)
    assert (summary.ttft, summary.tpot, summary.itl) == (None, None, None)
    assert summary.latency.mean == 4.0
