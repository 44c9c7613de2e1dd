"""Every kind of invalid input has a status, a code and the name of the field, in OpenAI's form."""

import openai
import pytest
from pydantic import ValidationError

from gateway.api.requests.native import NativeBody
from gateway.api.requests.responses import ResponsesBody
from gateway.api.requests.schemas import ChatBody, CompletionBody
from gateway.api.routes.tokens import DetokenizeBody, TokenizeBody
from gateway.text.encoding import MAX_PIECES
from tests.support.gateway.engines import REFUSED, VOCAB
from tests.support.gateway.http import error_of
from tests.support.gateway.services import Gateway, Service, Target, tokenizer_files
from tests.support.gateway.texts import HELLO

LONG = [5] * 500


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"seed": "seven"}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": "high"}, "repetition_penalty"),
        ({"echo": "yes"}, "echo"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"priority": 0.5}, "priority"),
        ({"timeout": 0}, "timeout"),
        ({"speculation": "sometimes"}, "speculation"),
        ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens"),
        ({"speculation": {"depth": 3}}, "speculation.depth"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [[5], [6]], "n": 65}, "prompt"),
        ({"prompt": ["a", "b"], "best_of": 65}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": [REFUSED]}, "prompt"),  # refused by the target
    ],
)
def test_bad_completions_are_refused_by_name(gateway, changes, param):
    response = gateway.client.post("/v1/completions", json={"prompt": "A", **changes})
    error = error_of(response, 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),  # refused by the template
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"logprobs": 5}, "logprobs"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"structural_tag": {}}, "structural_tag"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"documents": ["text"]}, "documents"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"echo": True}, "echo"),
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"lora_path": "x"}, "lora_path"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
def test_bad_chats_are_refused_by_name(gateway, changes, param):
    response = gateway.client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2, **changes})
    error = error_of(response, 400)
    assert (error["type"], (error["param"] or "").split(".")[0]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": None}, {"logit_bias": {}}, {"presence_penalty": 0}, {"repetition_penalty": 1},
        {"response_format": {"type": "text"}},
        {"echo": False}, {"best_of": 1}, {"suffix": None}, {"top_k": -1}, {"stop": None}, {"stop": []}, {"user": "u"},
        {"max_tokens": None}, {"temperature": 1}, {"n": None}, {"stream": None},
    ],
)  # fmt: skip
def test_values_that_change_nothing_are_allowed(gateway, changes):
    assert gateway.client.post("/v1/completions", json={"prompt": "A", **changes}).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "options", "count"), [(LONG, {}, "500"), ([5] * 390, {"max_tokens": 11}, "390"), ([5] * 400, {}, "400")]
)
def test_prompts_beyond_the_context_are_refused(gateway, prompt, options, count):
    error = error_of(gateway.client.post("/v1/completions", json={"prompt": prompt, **options}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "400" in error["message"]
    assert count in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "sent", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 500}]}, "messages"),
        ("/v1/responses", {"input": "x" * 500}, "input"),
        ("/generate", {"input_ids": LONG}, "input_ids"),
    ],
)
def test_errors_of_long_prompts_name_the_request_field(gateway, route, sent, param, stream):
    error = error_of(gateway.client.post(route, json=sent | {"stream": stream}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


@pytest.mark.parametrize("limit", [1000, 2**70])
@pytest.mark.parametrize(
    ("route", "name"),
    [
        ("/v1/completions", "max_tokens"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/responses", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
def test_limits_beyond_the_context_are_refused_under_each_name(gateway, route, name, limit):
    given = {
        "/v1/completions": {"prompt": "A"},
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/responses": {"input": "A"},
    }
    error = error_of(gateway.client.post(route, json={**given[route], name: limit}), 400)
    assert error["code"] == "context_length_exceeded"
    assert str(limit) in error["message"]


def test_the_default_answer_is_cut_to_what_fits(gateway):
    body = {"prompt": [5] * 390, "ignore_eos": True}
    assert gateway.client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 10
    body = {"messages": HELLO, "ignore_eos": True, "max_completion_tokens": None, "temperature": 0}
    usage = gateway.client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == 400


def test_unknown_models_are_404_also_for_the_openai_client(gateway):
    error = error_of(gateway.client.post("/v1/completions", json={"prompt": "A", "model": "gpt-7"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="gpt-7"),
    ):
        client.chat.completions.create(model="gpt-7", messages=HELLO)


MANY = 5000
WRONG = dict.fromkeys(map(str, range(MANY)))


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (CompletionBody, {"prompt": [5] * MANY + ["x"]}),
        (CompletionBody, {"prompt": [""] * MANY + [5]}),
        (CompletionBody, {"prompt": [[5], [5.0] * MANY]}),
        (CompletionBody, {"prompt": "A", "stop": [0] * MANY}),
        (CompletionBody, {"prompt": "A", "stop_token_ids": [""] * MANY}),
        (CompletionBody, {"prompt": "A", "logit_bias": WRONG}),
        (CompletionBody, {"prompt": "A", "speculation": WRONG}),
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": [0] * MANY}]}),
        (ChatBody, {"messages": [{"role": "user", "tool_calls": [0] * MANY}]}),
        (ChatBody, {"messages": HELLO, "tools": [0] * MANY}),
        (NativeBody, {"input_ids": [""] * MANY}),
        (NativeBody, {"text": "A", "sampling_params": [0] * MANY}),
        (NativeBody, {"text": "A", "sampling_params": [{}] * MANY}),
        (NativeBody, {"text": "A", "sampling_params": WRONG}),
        (NativeBody, {"text": "A", "sampling_params": [WRONG] * MANY}),
        (ResponsesBody, {"input": [{}] * MANY}),
        (ResponsesBody, {"input": "A", "metadata": WRONG}),
        (TokenizeBody, {"prompt": [5] * MANY}),
        (DetokenizeBody, {"tokens": [""] * MANY}),
    ],
)
def test_of_many_wrong_values_one_is_reported(body, fields):
    """Reporting all of them would block the event loop, the longer the more there are."""
    with pytest.raises(ValidationError) as error:
        body.model_validate(fields)
    assert error.value.error_count() < 10


def test_too_many_entries_are_refused_by_name(gateway):
    many = [HELLO[0]] * (MAX_PIECES + 1)
    for path, changes, param in (
        ("/v1/chat/completions", {"messages": many}, "messages"),
        ("/v1/responses", {"input": many, "prompt": None}, "input"),
        ("/tokenize", {"messages": many, "prompt": None}, "messages"),
        ("/v1/completions", {"logit_bias": dict.fromkeys(map(str, range(1025)), 0)}, "logit_bias"),
        ("/v1/completions", {"speculation": WRONG}, "speculation"),
        ("/generate", {"sampling_params": WRONG}, "sampling_params"),
    ):
        sent = {"prompt": "A", "text": "A"} | changes
        error = error_of(gateway.client.post(path, json=sent), 400)
        assert (error["param"], "at most" in error["message"]) == (param, True)


def test_errors_name_query_parameters(gateway):
    error = error_of(gateway.client.post("/flush_cache?timeout=long", headers=gateway.admin), 400)
    assert error["param"] == "timeout"


PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
TEXT = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [TEXT, PICTURE]}]},
            "messages.0.content.1.type: Input should be 'text'",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should"),
        ("/v1/responses", {"input": [{"type": "reasoning"}]}, "input.0.type: Input should be 'message'"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [PICTURE]}]},
            "input.0.content.0.type: Input should be 'input_text'",
        ),
        ("/v1/completions", {"prompt": [[1, "a"]]}, "prompt.0.1: Input should be a valid integer"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer"),
        ("/v1/completions", {"prompt": [1.5]}, "prompt.0: Input should be a valid string, integer or list"),
        ("/v1/completions", {"prompt": 1.5}, "prompt: Input should be a valid string or list"),
        ("/v1/completions", {"prompt": [[1], "a"]}, "prompt.1: Input should be a valid list"),
        ("/v1/completions", {"prompt": "a", "stop": ["b", 5]}, "stop.1: Input should be a valid string"),
        ("/v1/completions", {"prompt": "a", "stop": 5}, "stop: Input should be a valid string or list"),
        (
            "/v1/completions",
            {"prompt": "a", "speculation": "maybe"},
            'speculation: Input should be "off", "auto", or an',
        ),
        ("/generate", {"text": ["a"], "speculation": ["ON"]}, 'speculation.0: Input should be "off", "auto", or an'),
        ("/v1/responses", {"input": [5]}, "input.0: Input should be a valid object"),
        (
            "/generate",
            {"text": ["a"], "sampling_params": [{"n": 0}]},
            "sampling_params.0.n: Input should be greater than or equal to 1",
        ),
    ],
)
def test_errors_of_union_fields_name_the_intended_type(gateway, path, body, message):
    error = error_of(gateway.client.post(path, json=body), 400)
    assert error["message"].startswith(message)
    assert error["param"] == message.split(":")[0]


def test_a_model_without_chat_template(folder):
    service = Service(Target, f"unix:{folder}/bare", files=tokenizer_files(template=None)).start()
    gateway = Gateway(folder, [service.address])
    try:
        gateway.wait()
        for route, sent in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/responses", {"input": HELLO})):
            error = error_of(gateway.client.post(route, json=sent), 400)
            assert "chat template" in error["message"]
            assert error["param"] in sent
        assert gateway.text("A", max_tokens=2) == "BC"
    finally:
        assert gateway.stop() == 0
        service.stop()
