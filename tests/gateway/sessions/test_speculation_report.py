"""Reports of speculation and time in the shapes of vLLM, SGLang and llama.cpp."""

import asyncio
import json

import openai
import pytest

from gateway.api.answers.completions import COMPLETION, CompletionReply, ResponseOptions
from gateway.api.answers.streaming import DONE
from gateway.orchestration.generation import Part
from gateway.sessions.request import GenerationRequest
from gateway.sessions.session import Session
from gateway.sessions.speculation_report import SpeculationReport
from gateway.sessions.step_stats import StepStats
from gateway.telemetry.metrics import Metrics
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from tests.support.gateway.requests import request_for
from tests.support.gateway.services import Gateway

STEPS = [
    StepStats(1, 0, 0), StepStats(3, 3, 2, source=SourceKind.DRAFT), StepStats(1, 3, 0, source=SourceKind.LOOKUP),
    StepStats(4, 3, 3, source=SourceKind.DRAFT), StepStats(1, 0, 0),
]  # fmt: skip


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def report(steps=STEPS, completion=10):
    return SpeculationReport(steps, 8, 3, completion, 0.5, 2.0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_continuous_usage_has_the_prompt_with_any_first_choice(order):
    class Choice:
        def __init__(self, place):
            self._turn = order.index(place)

        async def next(self):
            while len(fields) < self._turn:
                await asyncio.sleep(0)
            return Part("x", [5], FinishReason.LENGTH, 7, 1, 1, 0, 0, 2, 1, None, None, {}, "", ())

    sent = GenerationRequest([5] * 7, SamplingParams()).choices(2)
    options = ResponseOptions(None, detail="off", usage=True, continuous_usage=True)
    reply = CompletionReply(COMPLETION, sent, options, request_id="r", model="m", fingerprint="f", candidates=2)
    fields = []
    async for event in reply.events([Choice(0), Choice(1)]):
        if event != DONE:
            body = json.loads(event.removeprefix(b"data: "))
            fields.append((body["usage"], [choice["index"] for choice in body["choices"]]))
    assert [index for _, index in fields] == [[order[0]], [order[1]], []]
    assert [usage["prompt_tokens"] for usage, _ in fields] == [7] * 3
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage, _ in fields] == [2] * 3
    assert [usage["completion_tokens"] for usage, _ in fields] == [1, 2, 2]


def test_a_report_in_vllm_s_shape():
    fields = report().metrics("detailed")
    assert fields["time_to_first_token_ms"] == 500
    assert fields["mean_itl_ms"] == pytest.approx(2000 / 9)
    assert fields["tokens_per_second"] == pytest.approx(4.5)
    assert fields["speculative_decoding"] == {
        "mean_acceptance_length": pytest.approx(1 + 5 / 3),
        "draft_acceptance_rate": pytest.approx(5 / 9),
        "acceptance_histogram": [1, 0, 1, 1],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 9,
        "num_spec_tokens": 3,
        "sources": {
            "draft": {"num_draft_tokens": 6, "num_accepted_draft_tokens": 5},
            "lookup": {"num_draft_tokens": 3, "num_accepted_draft_tokens": 0},
        },
        "per_step_accepted": [2, 0, 3],
        "per_step_drafted": [3, 3, 3],
    }
    assert "per_step_accepted" not in report().metrics("summary")["speculative_decoding"]
    plain = report(STEPS[:1], 1).metrics("detailed")
    assert plain["mean_itl_ms"] is None
    assert plain["speculative_decoding"]["mean_acceptance_length"] is None
    assert plain["speculative_decoding"]["acceptance_histogram"] == []


def test_a_report_in_llama_cpp_s_shape():
    fields = report().timings()
    assert (fields["cache_n"], fields["prompt_n"], fields["predicted_n"]) == (3, 5, 10)
    assert (fields["draft_n"], fields["draft_n_accepted"]) == (9, 5)
    assert fields["predicted_per_second"] == pytest.approx(5)
    assert "draft_n" not in report(STEPS[:1], 1).timings()


def test_a_report_in_sglang_s_shape():
    fields = report().meta_info()
    assert (fields["spec_verify_ct"], fields["spec_accept_length"]) == (5, 2.0)
    assert fields["spec_accept_rate"] == pytest.approx(5 / 9)
    assert fields["spec_num_correct_drafts"] == fields["spec_accept_token_num"] == fields["spec_accepted_drafts"] == 5
    assert fields["spec_num_proposed_drafts"] == fields["spec_draft_token_num"] == fields["spec_proposed_drafts"] == 9
    assert fields["spec_accept_histogram"] == fields["spec_correct_drafts_histogram"] == [1, 0, 1, 1]


@pytest.mark.usefixtures("proposals_in_time")
def test_answers_have_speculation_metrics(client):
    answer = client.completions.create(model="default", prompt="A", max_tokens=90, temperature=0)
    fields, usage = answer.metrics["speculative_decoding"], answer.usage.completion_tokens_details
    assert fields["num_accepted_draft_tokens"] == usage.accepted_prediction_tokens > 0
    assert fields["num_draft_tokens"] == usage.accepted_prediction_tokens + usage.rejected_prediction_tokens
    assert sum(fields["acceptance_histogram"]) == fields["num_spec_steps"]
    assert answer.metrics["time_to_first_token_ms"] > 0
    assert answer.timings["predicted_n"] == 90
    assert answer.timings["draft_n"] == fields["num_draft_tokens"]


@pytest.mark.usefixtures("proposals_in_time")
def test_several_choices_have_their_own_reports(client):
    answer = client.completions.create(model="default", prompt="A", max_tokens=30, n=2, seed=0)
    assert not hasattr(answer, "metrics")
    for choice in answer.choices:
        assert choice.metrics["speculative_decoding"]["num_spec_steps"] > 0
        assert choice.timings["predicted_n"] == 30


@pytest.mark.parametrize("enabled", [False, True])
def test_steps_are_reported_while_their_text_is_held_back(client, enabled):
    """D may begin a stop string, and E after it excludes that."""
    chunks = list(client.completions.create(
        model="default", prompt="A", max_tokens=8, temperature=0, stream=True, stop=["BX", "DX", "FX"],
        stream_options={"include_usage": True}, extra_body={"speculation": {"report": True, "enabled": enabled}},
    ))  # fmt: skip
    steps = [choice.speculation for chunk in chunks for choice in chunk.choices]
    assert "".join(text for step in steps for texts in step["texts"] for text in texts) == "BCDEFGHI"
    assert sum(sum(step["tokens"]) for step in steps) == chunks[-1].usage.completion_tokens == 8


@pytest.mark.usefixtures("proposals_in_time")
def test_usage_and_report_agree_where_a_stop_string_ends_the_answer(client):
    for stop in "EFGHIJKL":
        answer = client.completions.create(model="default", prompt="A", max_tokens=90, temperature=0, stop=[stop])
        fields, usage = answer.metrics["speculative_decoding"], answer.usage.completion_tokens_details
        assert fields["num_accepted_draft_tokens"] == usage.accepted_prediction_tokens
        assert fields["num_draft_tokens"] == usage.accepted_prediction_tokens + usage.rejected_prediction_tokens


@pytest.mark.parametrize("usage", [False, True])
def test_the_last_event_of_a_stream_has_the_report(client, usage):
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "x"}], max_tokens=30, temperature=0, stream=True,
        **options,
    ))  # fmt: skip
    assert [hasattr(chunk, "timings") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].timings["predicted_n"] == 30


@pytest.mark.usefixtures("proposals_in_time")
def test_vllm_s_counters_equal_ours(gateway):
    gateway.complete("A", max_tokens=90)
    name = "vllm:spec_decode_num_"
    drafts = gateway.metric(f"{name}drafts_total", model_name="counting", engine="0")
    accepted = gateway.metric(f"{name}accepted_tokens_total")
    assert accepted == gateway.metric("outrider_accepted_draft_tokens_total") > 0
    assert gateway.metric(f"{name}draft_tokens_total") == gateway.metric("outrider_verified_draft_tokens_total")
    by_position = [gateway.metric(f"{name}accepted_tokens_per_pos_total", position=i) for i in range(5)]
    assert drafts >= by_position[0] > 0
    assert by_position[0] >= by_position[1]
    assert by_position[2:] == [0, 0, 0]  # the third proposed token is always wrong
    assert sum(by_position) == accepted


def test_reports_can_be_disabled(folder, target, draft):
    flags = {"per_request_spec_decode_metrics": "off", "disable_vllm_metrics": True}
    quiet = Gateway(folder, [target.address], [draft.address], **flags).wait()
    try:
        body = quiet.complete("A", max_tokens=4)
        assert "metrics" not in body
        assert "timings" not in body
        stream = quiet.client.post("/v1/completions", json={"prompt": "A", "stream": True}).text
        assert "timings" not in json.loads(stream.split("\n\n")[-3].removeprefix("data: "))
        assert "vllm:" not in quiet.client.get("/metrics").text
    finally:
        assert quiet.stop() == 0


def test_a_commit_of_plain_steps_counts_each_step():
    session = Session(1, request_for([5, 6], 20))
    metrics = Metrics()
    for tokens, verified, accepted in (([1], 0, 0), ([2, 3, 4, 5], 0, 0), ([6, 7, 8], 4, 2), ([9, 10], 0, 0)):
        metrics.count(session, len(tokens), verified, accepted, 1.0, len(tokens))
        session.commit(tokens, verified, accepted, FinishReason.RUNNING)
    assert [one.tokens for one in session.stats.steps] == [1, 1, 1, 1, 1, 3, 1, 1]
    assert len(session.stats.steps) == 8
    tally = metrics.tally
    assert (tally.steps, tally.tokens, tally.steps_with_draft, tally.steps_without_draft) == (8, 10, 1, 6)
    assert SpeculationReport(session.stats.steps, 2, 0, 10, 0.5, 2.0).meta_info()["spec_verify_ct"] == 8
