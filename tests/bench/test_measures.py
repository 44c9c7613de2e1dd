"""Figures from outcomes whose times are known."""

import math

import numpy as np
import pytest

from bench.serve import server_metrics
from bench.serve.load import arrivals
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
from bench.serve.outcome import Outcome, read_event


def answered(category="x", due=0.0, pieces=(1.0, 2.0, 4.0), tokens=7, **options):
    facts = {"prompt_tokens": 5, "counted": True, "ended": pieces[-1] + 0.5, "streamed": True} | options
    return Outcome(category, due=due, sent=due, pieces=list(pieces), texts=["?"] * len(pieces), output_tokens=tokens,
                   **facts)  # fmt: skip


def test_latencies_count_from_when_a_request_was_due():
    outcome = answered(due=0.25)
    assert outcome.ttft == 0.75
    assert outcome.latency == 3.75
    assert outcome.tpot == 3.0 / 6
    assert outcome.gaps == [1.0, 2.0]
    assert answered(pieces=(1.0,), tokens=1).tpot is None
    assert answered(streamed=False).ttft is None


def test_a_summary_leaves_failures_out():
    failed = answered(tokens=100, error="HTTP 500", detail="oh")
    outcomes = [answered(), answered(due=1.0, pieces=(2.0, 3.0), tokens=3, learning_counters=False), failed]
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


def test_nothing_but_failures_is_a_summary_too():
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


def test_categories_have_figures_of_their_own():
    outcomes = [answered("b", drafted=8, accepted=3), answered("a"), answered("b", drafted=4, accepted=0)]
    found = by_category(outcomes, 5.0)
    assert list(found) == ["b", "a"]
    assert found["a"].speculation is None
    assert found["b"].speculation == Speculation(14 / 11, 0.25, source="answers")


def test_positions_from_the_steps_of_answers():
    """Of 10 steps 4 accepted nothing, 3 one token, 2 two, 1 three."""
    outcomes = [
        answered(drafted=8, accepted=3, histogram=[3, 2, 1]),
        answered(drafted=8, accepted=7, histogram=[1, 1, 1, 1]),
        answered(drafted=0, accepted=0),
    ]
    assert speculation(outcomes).per_position == (0.6, 0.3, 0.1)
    assert per_position([]) == per_position([[], [0, 0]]) == ()


def test_no_draft_token_is_no_speculation():
    assert speculation([answered(drafted=0, accepted=0), answered()]) is None


def test_tokens_over_time_add_up():
    outcomes = [answered(), answered(pieces=(1.5, 3.9), tokens=8)]
    begins, rates = tokens_over_time(outcomes, 9)
    assert begins[:2] == [0.0, 0.5]
    assert sum(rate * 0.5 for rate in rates) == pytest.approx(15)
    assert rates[3] == pytest.approx(4 / 0.5), "the half second after 1.5 has one piece of four tokens"


@pytest.mark.parametrize(
    "event",
    [
        {"usage": {"completion_tokens": 9, "prompt_tokens": 3,
                   "completion_tokens_details": {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}}},
        {"timings": {"prompt_n": 3, "predicted_n": 9, "draft_n": 6, "draft_n_accepted": 4}},
        {"usage": {"completion_tokens": 9, "prompt_tokens": 3, "completion_tokens_details": None},
         "metrics": {"speculative_decoding": {"num_draft_tokens": 6, "num_accepted_draft_tokens": 4,
                                              "acceptance_histogram": [1, 2, 1]}}},
        {"usage": {"completion_tokens": 9, "prompt_tokens": 3},
         "sglext": {"spec_num_proposed_drafts": 6, "spec_num_correct_drafts": 4}},
    ],
)  # fmt: skip
def test_answers_of_all_makes_tell_of_speculation(event):
    outcome = Outcome("x")
    read_event(outcome, {"choices": [], **event}, 1.0)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.learning_counters) == (3, 9, True)
    assert (outcome.drafted, outcome.accepted) == (6, 4)
    assert outcome.pieces == []
    assert outcome.histogram == ([1, 2, 1] if "metrics" in event else [])


def test_thoughts_are_text():
    outcome = Outcome("x")
    read_event(outcome, {"choices": [{"delta": {"reasoning_content": "hm", "content": None}}]}, 1.0)
    read_event(outcome, {"choices": [{"delta": {"content": "so"}, "finish_reason": "stop"}], "usage": None}, 2.0)
    assert (outcome.text, outcome.pieces, outcome.finish) == ("hmso", [1.0, 2.0], "stop")


def test_thoughts_that_come_twice_are_taken_once_and_stay_out_of_later_turns():
    outcome = Outcome("x")
    read_event(outcome, {"choices": [{"delta": {"reasoning": "hm", "reasoning_content": "hm"}}]}, 1.0)
    read_event(outcome, {"choices": [{"message": {"reasoning": ", ", "content": "so"}}]}, 2.0)
    assert (outcome.text, outcome.content) == ("hm, so", "so")


def test_an_answer_in_parts():
    outcome = Outcome("x")
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    parts = [{"type": "text", "text": "s"}, {"type": "text", "text": "o"}]
    read_event(outcome, {"choices": [{"delta": {"content": [thought, *parts]}}]}, 1.0)
    assert (outcome.text, outcome.content, outcome.pieces) == ("hmso", "so", [1.0])


def chunks(*deltas, tokens):
    """An answer whose chunks come a second after another, the last with the finish reason, and then its usage."""
    outcome = Outcome("x", streamed=True)
    for second, delta in enumerate([*deltas, {}], start=1):
        finish = None if delta else "stop"
        read_event(outcome, {"choices": [{"delta": delta, "finish_reason": finish}]}, float(second))
    read_event(outcome, {"choices": [], "usage": {"completion_tokens": tokens}}, len(deltas) + 9.0)
    return outcome


def test_tokens_without_text_take_time():
    said = {"content": "w"}
    outcome = chunks({"role": "assistant"}, said, said, {"content": ""}, {"content": ""}, tokens=5)
    assert (outcome.ttft, outcome.latency, outcome.tpot, outcome.gaps) == (2.0, 6.0, 4.0 / 4, [1.0])
    single = chunks(said, {"content": ""}, tokens=3)
    assert single.tpot == 2.0 / 2
    assert summarize([outcome, single], 9.0).tpot.count == 2


def test_each_of_several_choices_takes_its_own_time():
    outcome = Outcome("x", streamed=True)
    said = [(1, 1.0, "no"), (0, 1.5, "a"), (1, 2.0, "no"), (0, 3.5, "b"), (1, 4.0, "no"), (1, 5.0, ""), (0, 6.0, "")]
    for index, second, text in said:
        end = {} if text else {"finish_reason": "stop", "metrics": {"speculative_decoding": SPECULATION[index]}}
        read_event(outcome, {"choices": [{"index": index, "delta": {"content": text}, **end}]}, second)
    read_event(outcome, {"choices": [], "usage": {"completion_tokens": 12}}, 7.0)
    assert (outcome.ttft, outcome.latency, outcome.gaps) == (1.0, 6.0, [1.0, 2.0, 2.0])
    assert outcome.tpot == ((5.0 - 1.0) + (6.0 - 1.5)) / (12 - 2)
    assert (outcome.text, outcome.content) == ("ab", "ab"), "what later turns go on from"
    assert outcome.histogram == [5, 3, 1]


SPECULATION = {0: {"acceptance_histogram": [1, 2, 1]}, 1: {"acceptance_histogram": [4, 1]}}


def test_an_answer_may_be_a_call_of_a_tool_alone():
    outcome = chunks({"role": "assistant"}, *[{"tool_calls": [{"function": {"arguments": "x"}}]}] * 3, tokens=4)
    assert (outcome.ttft, outcome.latency, outcome.tpot, outcome.text) == (2.0, 5.0, 1.0, "")
    assert outcome.error == ""


def test_whole_answers_have_no_time_per_token():
    whole = answered(streamed=False)
    assert whole.tpot is None
    assert answered(pieces=(1.0,), tokens=3).tpot is None, "all came at once"
    summary = summarize([whole], 5.0)
    assert (summary.ttft, summary.tpot, summary.itl) == (None, None, None)
    assert summary.latency.mean == 4.0


@pytest.mark.parametrize("event", [
    {"choices": ["odd"]}, {"choices": 7}, {"choices": [{"delta": "odd"}]}, {"choices": [{"delta": {"content": 7}}]},
    {"choices": [{"delta": {"content": ["odd"]}}]}, {"usage": [7]}, {"usage": {"completion_tokens": "many"}},
    {"usage": {"completion_tokens": [7]}}, {"metrics": 7}, {"timings": [7]},
    {"sglext": {"spec_accept_histogram": [[7]]}},
])  # fmt: skip
def test_a_chunk_that_nobody_foresaw_is_a_failure_with_a_name(event):
    outcome = Outcome("x")
    read_event(outcome, event, 1.0)
    assert outcome.error == "chunk of an unknown form"
    assert str(event) in outcome.detail


VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.76e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {second}
"""
OURS = """\
# TYPE outrider_verification_steps_total counter
outrider_verification_steps_total {steps}
# TYPE outrider_generated_tokens_total counter
outrider_generated_tokens_total {tokens}
# TYPE outrider_verified_draft_tokens_total counter
outrider_verified_draft_tokens_total {verified}
# TYPE outrider_accepted_draft_tokens_total counter
outrider_accepted_draft_tokens_total {accepted}
"""
SGLANG = """\
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="0"} 2.5
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{engine_type="unified",model_name="m",tp_rank="0"} 0.5
"""


def test_counters_are_read_before_and_after():
    before = server_metrics.read(VLLM.format(drafts=10, drafted=30, accepted=20, first=10, second=10))
    after = server_metrics.read(VLLM.format(drafts=30, drafted=90, accepted=40, first=25, second=15))
    found = server_metrics.speculation(before, after)
    assert found.accept_length == 2.0
    assert found.acceptance_rate == pytest.approx(1 / 3)
    assert found.per_position == (0.75, 0.25)
    assert server_metrics.speculation(after, after) is None, "nothing was drafted in between"
    ours = server_metrics.speculation(
        server_metrics.read(OURS.format(steps=5, tokens=5, verified=0, accepted=0)),
        server_metrics.read(OURS.format(steps=15, tokens=25, verified=40, accepted=10)),
    )
    assert (ours.accept_length, ours.acceptance_rate) == (2.0, 0.25)
    assert server_metrics.speculation({}, server_metrics.read(SGLANG)).accept_length == 2.5
    assert server_metrics.read("<html>not found</html>") == {}
    assert server_metrics.speculation(server_metrics.read(None), server_metrics.read("")) is None


def test_nothing_is_told_of_a_server_that_began_anew():
    full = {"drafts": 10, "drafted": 30, "accepted": 20, "first": 10, "second": 10}
    batch_step = {"steps": 9, "tokens": 90, "verified": 90, "accepted": 81}
    few = {"steps": 8, "tokens": 8, "verified": 0, "accepted": 0}
    for page, more, less in ((VLLM, full, dict.fromkeys(full, 4)), (OURS, batch_step, few)):
        before, after = (server_metrics.read(page.format(**numbers)) for numbers in (more, less))
        assert server_metrics.speculation(before, after) is None
    lower = server_metrics.read(OURS.format(steps=12, tokens=20, verified=95, accepted=4))
    assert server_metrics.speculation(server_metrics.read(OURS.format(**batch_step)), lower) is None


def test_gauges_of_an_earlier_load_say_nothing():
    """SGLang's counter is there and does not grow, while its gauges still say what was."""
    calls = "# TYPE sglang:spec_verify_calls_total counter\nsglang:spec_verify_calls_total{{}} {}\n"
    calls += "# TYPE sglang:generation_tokens_total counter\nsglang:generation_tokens_total{{}} {}\n"
    before, after = (server_metrics.read(SGLANG + calls.format(*counts)) for counts in ((10, 30), (20, 70)))
    assert server_metrics.speculation(before, after).accept_length == 4.0
    assert server_metrics.speculation(after, server_metrics.read(SGLANG + calls.format(20, 90))) is None
    assert server_metrics.speculation(after, before) is None, "it began anew in between"


def test_arrivals_keep_their_rate_and_their_burstiness():
    times = arrivals(2001, 50.0, 1.0, seed=3)
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(40.0)
    assert times == sorted(times)
    assert times == arrivals(2001, 50.0, 1.0, seed=3)
    variation = {b: np.diff(arrivals(2001, 50.0, b, 3)).std() * 50 for b in (0.25, 1.0, 100.0)}
    assert variation[1.0] == pytest.approx(1.0, abs=0.1), "gaps of Poisson arrivals vary as much as they last"
    assert variation[0.25] == pytest.approx(2.0, abs=0.3)
    assert variation[100.0] == pytest.approx(0.1, abs=0.02)
    assert arrivals(5, 4.0, math.inf, 0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert arrivals(1, 5.0, 1.0, 0) == [0.0]
    assert arrivals(0, 5.0, 1.0, 0) == []
