"""The log of answers: one event per answer, with the request's id, without text."""

import json

import pytest

from tests.support.gateway.services import Draft, Gateway, Service, Target


@pytest.fixture
def log_of(tmp_path):
    """The log of a gateway with these flags that answered once."""

    def ask(**flags):
        target = Service(Target, f"unix:{tmp_path}/target.sock").start()
        draft = Service(Draft, f"unix:{tmp_path}/draft.sock").start()
        gateway = Gateway(tmp_path, [target.address], [draft.address], **flags)
        try:
            gateway.wait()
            body = {"model": "default", "prompt": "ABC", "max_tokens": 9, "temperature": 0}
            headers = {"X-Request-Id": "q7"}
            assert gateway.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        finally:
            assert gateway.stop() == 0
            target.stop()
            draft.stop()
        return gateway.log.read_text().splitlines()

    return ask


def test_every_answer_is_logged(log_of):
    events = [json.loads(line) for line in log_of(log_format="json", enable_log_requests=True)]
    assert {event["role"] for event in events} == {"gateway"}
    (event,) = [event for event in events if "outcome" in event]
    assert event["request_id"] == "q7"
    assert (event["outcome"], event["prompt_tokens"], event["completion_tokens"]) == ("length", 3, 9)
    assert event["steps"] == 9 - event["accepted_draft_tokens"]
    assert 0 <= event["first_token_seconds"] <= event["seconds"]
    assert not any("ABC" in line or "DEF" in line for line in map(str, events))


def test_the_request_log_is_off_by_default(log_of):
    lines = log_of()
    assert any("REST on" in line for line in lines)
    assert not any("an answer ended" in line for line in lines)
