"""Parsing of chunks from several servers, and the times of an answer."""

import pytest

from bench.serve.metrics import (
    summarize,
)
from bench.serve.outcome import Outcome, read_event


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
def test_draft_token_counts_of_every_server(event):
    outcome = Outcome("x")
    read_event(outcome, {"choices": [], **event}, 1.0)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.counted) == (3, 9, True)
    assert (outcome.drafted, outcome.accepted) == (6, 4)
    assert outcome.pieces == []
    assert outcome.histogram == ([1, 2, 1] if "metrics" in event else [])


def test_reasoning_counts_as_text():
    outcome = Outcome("x")
    read_event(outcome, {"choices": [{"delta": {"reasoning_content": "hm", "content": None}}]}, 1.0)
    read_event(outcome, {"choices": [{"delta": {"content": "so"}, "finish_reason": "stop"}], "usage": None}, 2.0)
    assert (outcome.text, outcome.pieces, outcome.finish) == ("hmso", [1.0, 2.0], "stop")


def test_duplicate_reasoning_counts_once_and_is_not_content():
    outcome = Outcome("x")
    read_event(outcome, {"choices": [{"delta": {"reasoning": "hm", "reasoning_content": "hm"}}]}, 1.0)
    read_event(outcome, {"choices": [{"message": {"reasoning": ", ", "content": "so"}}]}, 2.0)
    assert (outcome.text, outcome.content) == ("hm, so", "so")


def test_content_in_parts():
    outcome = Outcome("x")
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    parts = [{"type": "text", "text": "s"}, {"type": "text", "text": "o"}]
    read_event(outcome, {"choices": [{"delta": {"content": [thought, *parts]}}]}, 1.0)
    assert (outcome.text, outcome.content, outcome.pieces) == ("hmso", "so", [1.0])


def chunks(*deltas, tokens):
    """An outcome of chunks that arrive one second apart; the last has the finish reason, then usage follows."""
    outcome = Outcome("x", streamed=True)
    for second, delta in enumerate([*deltas, {}], start=1):
        finish = None if delta else "stop"
        read_event(outcome, {"choices": [{"delta": delta, "finish_reason": finish}]}, float(second))
    read_event(outcome, {"choices": [], "usage": {"completion_tokens": tokens}}, len(deltas) + 9.0)
    return outcome


def test_tokens_without_text_count_in_times():
    text = {"content": "w"}
    outcome = chunks({"role": "assistant"}, text, text, {"content": ""}, {"content": ""}, tokens=5)
    assert (outcome.ttft, outcome.latency, outcome.tpot, outcome.gaps) == (2.0, 6.0, 4.0 / 4, [1.0])
    single = chunks(text, {"content": ""}, tokens=3)
    assert single.tpot == 2.0 / 2
    assert summarize([outcome, single], 9.0).tpot.count == 2


SPECULATION = {0: {"acceptance_histogram": [1, 2, 1]}, 1: {"acceptance_histogram": [4, 1]}}


def test_choices_have_separate_times():
    outcome = Outcome("x", streamed=True)
    arrivals = [
        (1, 1.0, "no"),
        (0, 1.5, "a"),
        (1, 2.0, "no"),
        (0, 3.5, "b"),
        (1, 4.0, "no"),
        (1, 5.0, ""),
        (0, 6.0, ""),
    ]
    for index, second, text in arrivals:
        end = {} if text else {"finish_reason": "stop", "metrics": {"speculative_decoding": SPECULATION[index]}}
        read_event(outcome, {"choices": [{"index": index, "delta": {"content": text}, **end}]}, second)
    read_event(outcome, {"choices": [], "usage": {"completion_tokens": 12}}, 7.0)
    assert (outcome.ttft, outcome.latency, outcome.gaps) == (1.0, 6.0, [1.0, 2.0, 2.0])
    assert outcome.tpot == ((5.0 - 1.0) + (6.0 - 1.5)) / (12 - 2)
    assert (outcome.text, outcome.content) == ("ab", "ab"), "later turns continue from the first choice"
    assert outcome.histogram == [5, 3, 1]


def test_an_answer_with_tool_calls_only():
    outcome = chunks({"role": "assistant"}, *[{"tool_calls": [{"function": {"arguments": "x"}}]}] * 3, tokens=4)
    assert (outcome.ttft, outcome.latency, outcome.tpot, outcome.text) == (2.0, 5.0, 1.0, "")
    assert outcome.error == ""


@pytest.mark.parametrize("event", [
    {"choices": ["odd"]}, {"choices": 7}, {"choices": [{"delta": "odd"}]}, {"choices": [{"delta": {"content": 7}}]},
    {"choices": [{"delta": {"content": ["odd"]}}]}, {"usage": [7]}, {"usage": {"completion_tokens": "many"}},
    {"usage": {"completion_tokens": [7]}}, {"metrics": 7}, {"timings": [7]},
    {"sglext": {"spec_accept_histogram": [[7]]}},
])  # fmt: skip
def test_chunks_of_unknown_form_are_failures(event):
    outcome = Outcome("x")
    read_event(outcome, event, 1.0)
    assert outcome.error == "chunk of an unknown form"
    assert str(event) in outcome.detail
