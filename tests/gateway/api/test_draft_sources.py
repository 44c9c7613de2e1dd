"""Requests choose their draft sources; answers, metrics and server info report draft tokens by source."""

import json

import pytest

from outrider.speculation.draft_source import ALL_SOURCES, SOURCES_BY_LABEL, SourceKind
from tests.support.gateway.services import until


def post(gateway, route, body):
    response = gateway.client.post(route, json=body)
    response.raise_for_status()
    return response.json()


BODIES = [
    ("/v1/completions", {"prompt": "A", "max_tokens": 20}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A"}], "max_tokens": 20}),
    ("/v1/responses", {"input": "A", "max_output_tokens": 20}),
    ("/generate", {"text": "A", "sampling_params": {"max_new_tokens": 20}}),
]


@pytest.mark.usefixtures("proposals_in_time")
@pytest.mark.parametrize(("route", "body"), BODIES, ids=[route for route, _ in BODIES])
def test_requests_choose_their_draft_sources(gateway, target, draft, route, body):
    opened = draft.engine.opened
    for labels in (["lookup"], ["head", "quantized"]):
        answer = post(gateway, route, body | {"speculation": {"sources": labels}})
        assert target.engine.seen[-1].draft_sources == {SOURCES_BY_LABEL[label] for label in labels}
        assert target.engine.seen[-1].max_draft_tokens is None
        assert sources_of(answer) == {}
    assert draft.engine.opened == opened, "only sessions that allow the draft service are opened there"
    for speculation in ({"sources": ["lookup", "draft"], "max_draft_tokens": 7}, "auto"):
        answer = post(gateway, route, body | {"speculation": speculation})
        opened += 1
        until(lambda: draft.engine.opened == opened)  # noqa: B023
        assert sources_of(answer).keys() == {"draft"}
        assert sources_of(answer)["draft"][1] > 0
    assert target.engine.seen[-1].draft_sources == ALL_SOURCES
    assert target.engine.seen[-2].max_draft_tokens == 7


def sources_of(answer):
    """Verified and accepted draft tokens by source, of any kind of answer."""
    found = answer["metrics"]["speculative_decoding"]["sources"] if "metrics" in answer else None
    found = found if found is not None else answer["meta_info"]["spec_sources"]
    return {source: tuple(counts.values()) for source, counts in found.items()}


def test_prompts_of_generate_choose_their_draft_sources_one_by_one(gateway, target):
    body = {
        "text": ["A", "B"],
        "speculation": [{"sources": ["lookup"]}, "off"],
        "sampling_params": {"max_new_tokens": 4},
    }
    post(gateway, "/generate", body)
    first, second = target.engine.seen[-2:]
    assert (first.draft_sources, first.max_draft_tokens) == ({SourceKind.LOOKUP}, None)
    assert second.max_draft_tokens == 0


@pytest.mark.parametrize(("route", "body"), BODIES, ids=[route for route, _ in BODIES])
def test_unknown_draft_sources_are_refused_with_the_known_ones(gateway, route, body):
    error = gateway.client.post(route, json=body | {"speculation": {"sources": ["draft", "oracle"]}})
    assert error.status_code == 400
    for part in ('"oracle" is no draft source', '"draft", "lookup", "head", "quantized"', "speculation.sources"):
        assert part in json.dumps(error.json()).replace('\\"', '"')


@pytest.mark.parametrize(("route", "body"), BODIES[2:], ids=["responses", "generate"])
def test_answers_without_step_reports_refuse_to_report_steps(gateway, route, body):
    error = gateway.client.post(route, json=body | {"speculation": {"report": True}})
    assert error.status_code == 400
    assert "speculation.report" in error.text


@pytest.mark.usefixtures("proposals_in_time")
def test_metrics_and_server_info_count_draft_tokens_by_source(gateway):
    def counted(source):
        return gateway.metric("outrider_accepted_draft_tokens_by_source_total", source=source)

    before = counted("draft")
    answer = post(gateway, "/v1/completions", {"prompt": "A", "max_tokens": 20})
    accepted = sources_of(answer)["draft"][1]
    assert counted("draft") == before + accepted
    assert counted("lookup") == counted("head") == counted("quantized") == 0
    info = gateway.client.get("/get_server_info").json()["draft_sources"]
    assert {label: one["self_speculation"] for label, one in info.items()} == {
        "draft": False, "lookup": True, "head": True, "quantized": True,
    }  # fmt: skip
    assert info["draft"]["running"]
    assert info["draft"]["accepted_draft_tokens"] == before + accepted
    assert not info["head"]["running"]
