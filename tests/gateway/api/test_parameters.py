"""Parameters of requests over real sockets, beyond those that every OpenAI client sends."""

import json

import openai
import pytest

from tests.support.gateway.engines import CONTEXT, EOS, SPECIAL, VOCAB, expected, tokenizer
from tests.support.gateway.http import events
from tests.support.gateway.services import until

TOKENIZER = tokenizer()
ASSISTANT = 3  # the last token of a rendered conversation


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def ids(text):
    return TOKENIZER.encode(text).ids


# --- ends of a text ---


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_a_stop_string_can_be_part_of_the_answer(gateway, name):
    choice = gateway.complete("A", max_tokens=12, stop=["FG", "EF"], **{name: True})["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("BCDEF", "EF")
    choice = gateway.complete("A", max_tokens=12, stop_token_ids=ids("E"), **{name: True}, logprobs=0)["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("BCDE", ids("E")[0])
    assert choice["logprobs"]["tokens"] == ["B", "C", "D", "E"]


def test_stop_reason_names_the_stop(gateway):
    assert gateway.complete("A", max_tokens=3)["choices"][0]["stop_reason"] is None
    assert (
        gateway.complete([VOCAB - 3], max_tokens=20)["choices"][0]["stop_reason"] is None
    )  # the model's end-of-sequence token
    choice = gateway.complete("A", max_tokens=12, stop="DE")["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("BC", "stop", "DE")


def test_special_tokens_can_be_part_of_the_text(gateway):
    prompt = [VOCAB - 3]
    plain = gateway.text(prompt, max_tokens=6, ignore_eos=True)
    whole = gateway.text(prompt, max_tokens=6, ignore_eos=True, skip_special_tokens=False)
    tail = expected(prompt, 6)
    assert plain == TOKENIZER.decode(tail)
    assert whole == TOKENIZER.decode(tail, skip_special_tokens=False)
    assert "".join(SPECIAL[:EOS]) in whole


@pytest.mark.parametrize("grammar", [{"json_schema": {"type": "object"}}, {"structured_outputs": {"regex": "[A-Z]*"}}])
def test_a_stop_token_ends_an_answer_with_a_grammar_and_is_named(gateway, target, grammar):
    """As a stop string and max_tokens do: the text may be a part of what the grammar describes."""
    sent = {"max_tokens": 12, "stop_token_ids": ids("E"), **grammar}
    choice = gateway.complete("A", **sent)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("BCD", "stop", ids("E")[0])
    assert target.engine.seen[-1].grammar is not None
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "temperature": 0,
        "stop_token_ids": [ASSISTANT + 3],
        **grammar,
    }
    for stream in (False, True):
        response = gateway.client.post("/v1/chat/completions", json={**body, "stream": stream})
        last = (events(response) if stream else [response.json()])[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", ASSISTANT + 3)


# --- sampling ---


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate"])
def test_a_top_p_of_0_is_the_likeliest_token(gateway, target, route):
    """OpenAI's range includes it."""
    own = {"/v1/completions": {"prompt": "A"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "A"}]}}
    own |= {"/v1/responses": {"input": "A"}, "/generate": {"text": "A", "sampling_params": {"top_p": 0}}}
    response = gateway.client.post(route, json={**own[route], **({} if route == "/generate" else {"top_p": 0})})
    assert response.status_code == 200, response.text
    sampling = target.engine.seen[-1].sampling
    assert (sampling.top_k, sampling.top_p) == (1, 1.0)
    assert response.json().get("top_p", 0) == 0


# --- prompts ---


def test_prompts_can_be_truncated(gateway):
    body = gateway.complete([5, 6, 7, 20], max_tokens=2, truncate_prompt_tokens=2, echo=True, return_token_ids=True)
    assert body["usage"]["prompt_tokens"] == 2
    assert body["choices"][0]["token_ids"] == [21, 22]
    assert body["choices"][0]["text"] == TOKENIZER.decode([7, 20, 21, 22])
    assert gateway.complete([20], max_tokens=2, truncate_prompt_tokens=9)["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("route", "sent", "rest"),
    [
        ("/v1/completions", {"prompt": [5] * 500}, 16),
        ("/v1/completions", {"prompt": [5] * 500, "max_tokens": 7}, 7),
        ("/v1/completions", {"prompt": [5] * 500, "max_tokens": 0, "echo": True}, 1),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 500}]}, 1),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 500}], "max_completion_tokens": 7}, 7),
        ("/v1/responses", {"input": "x" * 500, "max_output_tokens": 7}, 7),
    ],
)
def test_prompts_can_be_truncated_to_the_context(gateway, target, route, sent, rest):
    response = gateway.client.post(route, json=sent | {"truncate_prompt_tokens": -1})
    assert response.status_code == 200, response.text
    assert target.engine.seen[-1].prompt_length == CONTEXT - rest


def test_an_answer_can_continue_the_last_message(gateway, target):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "xA "}]
    body = {"messages": messages, "max_tokens": 3, "temperature": 0, "continue_final_message": True}
    answer = gateway.client.post("/v1/chat/completions", json=body).json()
    assert TOKENIZER.decode(target.engine.seen[-1].tokens.tolist()) == "hixA "
    assert answer["choices"][0]["message"]["content"] == TOKENIZER.decode(expected(ids("xA "), 3))
    response = gateway.client.post("/v1/chat/completions", json={**body, "add_generation_prompt": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")
    blank = {**body, "messages": [*messages[:1], {"role": "assistant", "content": " "}]}
    assert gateway.client.post("/v1/chat/completions", json=blank).status_code in (200, 400)


@pytest.mark.parametrize("top_k", [VOCAB, 2**31, 2**40, 2**70])
def test_top_k_above_the_vocabulary_keeps_all_tokens(gateway, target, top_k):
    """The gateway reduces it, because the wire has no room for larger numbers."""
    assert gateway.complete("A", max_tokens=2, top_k=top_k)["choices"][0]["text"] == "BC"
    assert target.engine.seen[-1].sampling.top_k == VOCAB
    body = {"text": "A", "sampling_params": {"max_new_tokens": 2, "temperature": 0, "top_k": top_k}}
    response = gateway.client.post("/generate", json=body)
    assert (response.status_code, response.json().get("text")) == (200, "BC")


def test_priority_reaches_the_target(gateway, target):
    gateway.complete("A", max_tokens=2, priority=-3)
    assert target.engine.seen[-1].priority == -3
    gateway.complete("A", max_tokens=2)
    assert target.engine.seen[-1].priority == 0


# --- time ---


@pytest.mark.parametrize("by_header", [False, True])
def test_a_timeout_ends_an_answer(gateway, target, draft, by_header):
    body = {"prompt": "A", "max_tokens": 350, "ignore_eos": True, "temperature": 0}
    headers = {"X-Request-Timeout": "1.5"} if by_header else {}
    body |= {} if by_header else {"timeout": 1.5}
    target.engine.delay = 0.3  # the whole text takes 35 s, with all proposals accepted
    try:
        response = gateway.client.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert response.headers["x-should-retry"] == "false"
        until(lambda: target.sessions == 0 and draft.sessions == 0, seconds=25)
        streamed = gateway.client.post("/v1/completions", json={**body, "stream": True}, headers=headers)
        *parts, error, done = [line for line in streamed.text.split("\n\n") if line]
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert parts
        until(lambda: target.sessions == 0 and draft.sessions == 0, seconds=25)
    finally:
        target.engine.delay = target.delay
    assert gateway.client.post("/v1/completions", json={"prompt": "A"}, headers={"X-Request-Timeout": "x"}).is_error


# --- speculation ---


def test_a_request_without_speculation_is_not_opened_on_the_draft(client, target, draft):
    opened = draft.engine.opened
    for value in ("off", {"enabled": False}, {"max_draft_tokens": 0}, {"sources": []}):
        answer = client.completions.create(
            model="default", prompt="A", max_tokens=40, temperature=0, extra_body={"speculation": value}
        )
        assert target.engine.seen[-1].max_draft_tokens == 0
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert draft.engine.opened == opened
    client.completions.create(
        model="default", prompt="A", max_tokens=4, extra_body={"speculation": {"max_draft_tokens": 2}}
    )
    assert target.engine.seen[-1].max_draft_tokens == 2
    client.completions.create(model="default", prompt="A", max_tokens=4, extra_body={"speculation": "auto"})
    assert target.engine.seen[-1].max_draft_tokens is None
    until(lambda: draft.engine.opened == opened + 2)  # the draft may receive it after the answer


@pytest.mark.usefixtures("proposals_in_time")
@pytest.mark.parametrize("stream", [False, True])
def test_step_statistics_are_returned_on_request(client, stream):
    options = {"model": "default", "prompt": "A", "max_tokens": 90, "temperature": 0, "stop": ["xyz"]}
    answer = client.completions.create(
        **options, stream=stream, extra_body={"speculation": {"report": True}, "return_token_ids": True}
    )
    choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
    steps = {"tokens": [], "verified": [], "accepted": [], "sources": [], "texts": [], "draft_texts": [], "guesses": []}
    for choice in choices:
        assert sum(choice.speculation["tokens"]) == len(choice.token_ids)
        for name, values in choice.speculation.items():
            steps[name] += values
    assert sum(steps["accepted"]) > 0
    for count, verified, accepted, source, texts, draft, former in zip(*steps.values(), strict=True):
        assert source == ("draft" if verified else None)
        assert accepted <= min(count, verified)
        assert len(texts) == count
        assert draft[:accepted] == texts[:accepted], "accepted tokens are those with the highest scores"
        assert bool(draft) == bool(verified)
        assert former == draft


# --- usage as it grows ---


def test_usage_can_come_with_every_chunk(client):
    chunks = list(client.completions.create(
        model="default", prompt="A", max_tokens=60, temperature=0, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True}, extra_body={"return_token_ids": True},
    ))  # fmt: skip
    count = 0
    for chunk in chunks[:-1]:
        count += len(chunk.choices[0].token_ids)
        assert chunk.usage.completion_tokens == count
        assert chunk.usage.prompt_tokens == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == count == 60
