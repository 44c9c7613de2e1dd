"""The `openai` client against a real target, draft service and gateway: tools, reasoning, schemas."""

from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from services.draft.drafters.ngram import NgramDrafter, NgramOptions
from tests.support.gateway.services import Gateway
from tests.support.system.services import draft_service, target_service
from tests.support.tiny import write_model, write_tokenizer

pytestmark = pytest.mark.system

ASK = [{"role": "user", "content": "weather?"}]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bonn", "Ulm"]
    days: int = Field(ge=0, le=9)


class Time(BaseModel):
    """The time of day."""

    zone: Literal["UTC"]


TOOLS = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Time)]
CALL = r'<tool_call>\{"name": "Weather", "arguments": \{"city": "(Bonn|Ulm)", "days": [0-9]\}\}</tool_call>'


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    base = tmp_path_factory.mktemp("openai")
    folder = write_tokenizer(write_model(base / "model", seed=1, max_position_embeddings=2048))
    target = target_service(folder, f"unix:{base}/target").start()
    draft = draft_service(f"unix:{base}/draft", NgramDrafter(NgramOptions())).start()
    gateway = Gateway(base, [target.address], [draft.address], reasoning_parser="qwen3").wait()
    yield gateway
    for service in (gateway, draft, target):
        service.stop()


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(client, **options):
    sent = {"model": "default", "messages": ASK, "max_tokens": 150, "seed": 3, **options}
    return client.chat.completions.create(**sent)


# --- calls ---


def test_a_named_tool_is_called(client):
    choice = chat(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "Weather"}}).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "Weather"
    Weather.model_validate_json(call.function.arguments)
    assert choice.finish_reason == "stop"
    assert choice.message.content is None
    assert call.id.startswith("call_")


@pytest.mark.parametrize("parallel", [True, False])
def test_some_tool_is_called(client, parallel):
    choice = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls) == 1 or parallel
    for call in choice.message.tool_calls:
        {"Weather": Weather, "Time": Time}[call.function.name].model_validate_json(call.function.arguments)


def test_calls_are_streamed_as_they_come(client):
    whole = chat(client, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
    calls, ends = [], []
    for chunk in chat(client, tools=TOOLS, tool_choice="required", stream=True):
        choice = chunk.choices[0]
        ends += [choice.finish_reason] if choice.finish_reason else []
        for part in choice.delta.tool_calls or ():
            if part.id is not None:
                assert (part.index, part.type) == (len(calls), "function")
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments
    assert calls == [[call.function.name, call.function.arguments] for call in whole]
    assert ends == ["tool_calls"]


def test_calls_that_the_model_writes_by_itself_are_found(client):
    options = {"tools": TOOLS, "extra_body": {"regex": "well " + CALL}}
    choice = chat(client, **options).choices[0]
    assert choice.message.content == "well"
    Weather.model_validate_json(choice.message.tool_calls[0].function.arguments)
    assert choice.finish_reason == "tool_calls"
    with client.chat.completions.stream(
        model="default", messages=ASK, max_tokens=150, seed=3, tools=TOOLS, extra_body={"regex": "well " + CALL}
    ) as stream:
        names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert names == ["Weather"]
    assert final.message.content == "well"
    assert isinstance(final.message.tool_calls[0].function.parsed_arguments, Weather)


def test_without_a_choice_of_tools_text_is_text(client):
    choice = chat(client, tools=TOOLS, tool_choice="none", extra_body={"regex": CALL}).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content.startswith("<tool_call>")
    assert choice.finish_reason == "stop"


def test_results_of_calls_go_back(client):
    call = chat(client, tools=TOOLS, tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"}
    messages = [*ASK, call.model_dump(exclude_none=True), result]
    assert chat(client, messages=messages, tools=TOOLS, max_tokens=5).choices[0].finish_reason in ("length", "stop")


def test_errors_name_the_wrong_field(client):
    for options in ({"tool_choice": "required"}, {"tools": TOOLS, "tool_choice": "maybe"}):
        with pytest.raises(openai.BadRequestError) as error:
            chat(client, **options)
        assert error.value.param == "tool_choice"


# --- reasoning ---


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_stands_apart(client, stream):
    extra = {"regex": "<think>[a-f]{9}</think>[A-F]{4}", "separate_reasoning": True}
    answer = chat(client, extra_body=extra, stream=stream)
    parts = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    reasoning = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    content = "".join(part.content or "" for part in parts)
    assert (len(reasoning), reasoning.islower()) == (9, True)
    assert (len(content), content.isupper()) == (4, True)
    raw = chat(client, extra_body=extra | {"separate_reasoning": False}).choices[0].message.content
    assert raw == f"<think>{reasoning}</think>{content}"
    hidden = chat(client, extra_body=extra | {"include_reasoning": False}).choices[0].message
    assert (hidden.content, getattr(hidden, "reasoning_content", None)) == (content, None)


# --- one text, for any speculation and any route ---


@pytest.mark.parametrize("temperature", [0, 1])
def test_speculation_never_changes_a_text(gateway, client, temperature):
    options = {"model": "default", "prompt": "ab ab ab ab ab", "max_tokens": 60, "temperature": temperature, "seed": 5}
    extra = {"ignore_eos": True, "return_token_ids": True}
    penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {"70": 3, "71": -100}}
    for more in ({}, penalties):
        texts = [
            client.completions.create(**options, **more, extra_body=extra | {"speculation": how}).choices[0].token_ids
            for how in ("off", "auto", {"max_draft_tokens": 1}, {"report": True})
        ]
        assert all(text == texts[0] for text in texts)
    sampling = {"max_new_tokens": 60, "temperature": temperature, "sampling_seed": 5, "ignore_eos": True}
    body = {"text": "ab ab ab ab ab", "sampling_params": sampling}
    plain = client.completions.create(**options, extra_body=extra).choices[0]
    native = gateway.client.post("/generate", json=body).json()
    assert native["output_ids"] == plain.token_ids
    assert native["text"] == plain.text
    ids = gateway.client.post("/tokenize", json={"prompt": "ab ab ab ab ab"}).json()["tokens"]
    again = gateway.client.post("/generate", json={"input_ids": ids, "sampling_params": sampling}).json()
    assert again["output_ids"] == plain.token_ids


@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_best_of_several_are_those_whose_tokens_are_the_likeliest(client, logprobs):
    wanted = {"model": "default", "prompt": ["ab ab ab", "hello"], "max_tokens": 12, "temperature": 1.0, "seed": 3}
    every = client.completions.create(**wanted, n=6, logprobs=0)
    best = client.completions.create(**wanted, n=2, best_of=6, logprobs=logprobs)
    expected = []
    for prompt in (every.choices[:6], every.choices[6:]):
        likely = {one.index: sum(one.logprobs.token_logprobs) / len(one.logprobs.token_logprobs) for one in prompt}
        expected += sorted(prompt, key=lambda one: -likely[one.index])[:2]
    assert [one.text for one in best.choices] == [one.text for one in expected]
    assert [one.index for one in best.choices] == [0, 1, 2, 3]
    assert best.usage.completion_tokens == every.usage.completion_tokens
    assert best.usage.prompt_tokens == every.usage.prompt_tokens
    for choice, one in zip(best.choices, expected, strict=True):
        assert (choice.logprobs is None) == (logprobs is None)
        if logprobs is not None:
            assert choice.logprobs.token_logprobs == one.logprobs.token_logprobs
