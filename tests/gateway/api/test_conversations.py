"""Conversations: chats and /v1/responses, through the `openai` client and the chat template."""

import json

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.client import Client
from tests.support.gateway.engines import VOCAB, expected, tokenizer_files
from tests.support.gateway.services import Gateway, Service, Target, until
from tests.support.gateway.texts import HELLO, TOKENIZER, decoded, ids

ASSISTANT = 3  # the last token of a rendered conversation


def create(client, **options):
    sent = {"model": "default", "input": "hello", "max_output_tokens": 30, "temperature": 0, **options}
    return client.responses.create(**sent)


@pytest.mark.usefixtures("proposals_in_time")
def test_a_response(client, target):
    response = create(client, instructions="be brief", metadata={"a": "b"})
    assert response.output_text == TOKENIZER.decode(expected([ASSISTANT], 30))
    assert TOKENIZER.decode(target.engine.seen[-1].tokens.tolist()) == "be briefhello"
    assert (response.object, response.status, response.incomplete_details.reason) == (
        "response", "incomplete", "max_output_tokens",
    )  # fmt: skip
    assert response.id.startswith("resp_")
    assert response.metadata == {"a": "b"}
    assert (response.usage.output_tokens, response.usage.total_tokens) == (30, 30 + response.usage.input_tokens)
    assert response.metrics["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("user", "returned"), [("me", "me"), (None, None), (2**70, None), ({"a": [2**70]}, None)])
def test_the_user_field_is_returned(gateway, user, returned, stream):
    body = {"input": "hello", "max_output_tokens": 2, "user": user, "stream": stream}
    answer = gateway.client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    response = json.loads(data[-1])["response"] if stream else answer.json()
    assert (response["user"], response["usage"]["output_tokens"]) == (returned, 2)


def test_a_conversation_with_a_token_limit(client, target):
    parts = [{"type": "input_text", "text": "he"}, {"type": "input_text", "text": "llo"}]
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
    ]
    items = [{"type": "message", "role": "developer", "content": "short"}, *turns, {"role": "user", "content": parts}]
    text = TOKENIZER.decode(expected([ASSISTANT], 9))
    response = create(client, input=items, extra_body={"stop": [text[4:]]})
    assert TOKENIZER.decode(target.engine.seen[-1].tokens.tolist()) == "shorthiAhe\nllo"
    assert (response.status, response.incomplete_details, response.output_text) == ("completed", None, text[:4])
    assert response.output[0].status == "completed"


def test_events_come_in_their_order(client):
    events = list(create(client, stream=True))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = TOKENIZER.decode(expected([ASSISTANT], 30))
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == text
    assert events[-1].response.output_text == text
    assert events[0].response.id == events[-1].response.id
    sent = {"model": "default", "input": "hello", "max_output_tokens": 30, "temperature": 0}
    with client.responses.stream(**sent, extra_body={"stop": [text[-3:]]}) as stream:
        assert "response.output_text.delta" in {event.type for event in stream}
        assert stream.get_final_response().output_text == text[:-3]


def test_log_probabilities_on_request(client):
    returned = create(client, max_output_tokens=3, include=["message.output_text.logprobs"], top_logprobs=2)
    entries = returned.output[0].content[0].logprobs
    assert len(entries) == 3
    assert len(entries[0].top_logprobs) == 2


def test_streams_have_logprobs_of_tokens_without_text(client):
    """Parts of a character, and possible beginnings of a stop string."""
    sent = {"model": "default", "input": "hello", "max_output_tokens": 150, "temperature": 0}
    with client.responses.stream(**sent, include=["message.output_text.logprobs"]) as stream:
        events = list(stream)
    returned = [len(event.logprobs) for event in events if event.type == "response.output_text.delta"]
    assert sum(returned) == len(events[-1].response.output[0].content[0].logprobs) == 150


def test_text_format_reaches_the_target(client, target):
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    assert create(client, max_output_tokens=2, text={"format": form}).text.format.type == "json_schema"
    assert target.engine.seen[-1].grammar.text == '{"type": "object"}'
    create(client, max_output_tokens=2)
    assert target.engine.seen[-1].grammar is None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"text": {"format": {"type": "xml"}}}, "response_format"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"const": 1 << 70}}}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": 3}}, "reasoning"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)
def test_errors_name_the_field(client, options, param):
    with pytest.raises(openai.BadRequestError) as error:
        create(client, **options)
    assert error.value.param.split(".")[0] == param


def test_errors_before_the_first_event_have_a_status(client, target, draft):
    with pytest.raises(openai.BadRequestError) as error:
        create(client, stream=True, input="x" * 500)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        create(client, stream=True, extra_body={"stop_token_ids": [VOCAB]})
    until(lambda: target.sessions == 0 and draft.sessions == 0)


def test_an_error_in_a_stream_is_an_event(client, gateway, target, monkeypatch):
    monkeypatch.setattr(target.engine, "delay", 0.1)  # the whole text takes far longer
    body = {"input": "hello", "max_output_tokens": 350, "temperature": 0, "stream": True, "timeout": 1.5}
    *events, last = gateway.client.post("/v1/responses", json=body).text.rstrip("\n").split("\n\n")
    name, data = last.split("\n")
    returned = json.loads(data.removeprefix("data: "))
    assert (name, returned["type"], returned["code"]) == ("event: error", "error", "deadline_exceeded")
    assert returned["sequence_number"] == len(events)
    assert returned["message"] == returned["error"]["message"]
    with pytest.raises(openai.APIError) as error:
        list(create(client, stream=True, max_output_tokens=350, extra_body={"timeout": 1.5}))
    assert error.value.code == "deadline_exceeded"


def test_chat_with_the_openai_client(client):
    answer = client.chat.completions.create(model="default", messages=HELLO, max_tokens=6, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == decoded(expected([ASSISTANT], 6))
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == 2 + len(ids("hello"))


def test_streamed_chat_with_the_openai_client(client):
    stream = client.chat.completions.create(
        model="default", messages=HELLO, max_completion_tokens=30, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == decoded(expected([ASSISTANT], 30))
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert [bool(c.choices) for c in chunks].count(False) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 30
    assert all(c.usage is None for c in chunks[:-1])


def test_chat_fills_the_rest_of_the_context_by_default(client):
    answer = client.chat.completions.create(
        model="default", messages=HELLO, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == 400
    assert answer.choices[0].finish_reason == "length"


def test_a_continued_text_keeps_its_first_space(tmp_path):
    """Llama 2's words include the space before them; an answer in a chat begins without one."""
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1} | {f"▁w{i}": i for i in range(2, VOCAB)}, "▁w2"))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    settings = {"chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"}
    files = {"tokenizer.json": words.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}
    service = Service(Target, f"unix:{tmp_path}/target", files=files).start()
    gateway = Gateway(tmp_path, [service.address]).wait()
    try:
        assert gateway.text("w5", max_tokens=2, echo=True) == "w5 w6 w7"
        body = {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 2, "temperature": 0}
        for more, text in (({}, "w6 w7"), ({"continue_final_message": True}, " w6 w7")):
            answer = gateway.client.post("/v1/chat/completions", json=body | more).json()
            assert answer["choices"][0]["message"]["content"] == text
        body = {"input": "w5", "max_output_tokens": 2, "temperature": 0}
        answer = gateway.client.post("/v1/responses", json=body).json()
        assert answer["output"][0]["content"][0]["text"] == "w6 w7"
        with Client(f"127.0.0.1:{gateway.grpc_port}") as client:
            for chat, text in ((True, "w6 w7"), (False, " w6 w7")):
                prompt = [{"role": "user", "content": "w5"}] if chat else "w5"
                assert client.complete(prompt, max_tokens=2, temperature=0).text == text
    finally:
        gateway.stop()
        service.stop()


def test_documents_and_effort_reach_the_template_and_the_begin_token_is_optional(tmp_path):
    documents = "{% for document in documents or [] %}{{ document.text }}{% endfor %}"
    files = tokenizer_files(documents + "{{ messages[0].content }}{{ reasoning_effort }}")
    files["tokenizer_config.json"] = json.dumps(
        json.loads(files["tokenizer_config.json"]) | {"add_bos_token": True}
    ).encode()
    service = Service(Target, f"unix:{tmp_path}/target", files=files).start()
    gateway = Gateway(tmp_path, [service.address]).wait()
    returned = {"max_tokens": 1, "return_token_ids": True}
    chat = {"messages": [{"role": "user", "content": "CD"}], "documents": [{"text": "AB"}]}
    try:
        assert gateway.complete("AB", **returned)["choices"][0]["prompt_token_ids"] == [0, *ids("AB")]
        bare = gateway.complete("AB", **returned, add_special_tokens=False)
        assert bare["choices"][0]["prompt_token_ids"] == ids("AB")
        answer = gateway.client.post("/v1/chat/completions", json=chat | returned).json()
        assert answer["prompt_token_ids"] == ids("ABCD")
        answer = gateway.client.post("/v1/chat/completions", json=chat | returned | {"reasoning_effort": "low"}).json()
        assert answer["prompt_token_ids"] == ids("ABCDlow")
        sent = {"input": "CD", "max_output_tokens": 1, "reasoning": {"effort": "low", "summary": "auto"}}
        answer = gateway.client.post("/v1/responses", json=sent).json()
        assert answer["reasoning"] == {"effort": "low", "summary": None}
        assert service.engine.seen[-1].tokens.tolist() == ids("CDlow")
        own = {"chat_template_kwargs": {"reasoning_effort": "high"}}
        gateway.client.post("/v1/responses", json=sent | own)
        assert service.engine.seen[-1].tokens.tolist() == ids("CDhigh")
    finally:
        gateway.stop()
        service.stop()


def test_text_parts_are_lines_and_unknown_fields_ignored(gateway, target):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 3, "temperature": 0, "user": "me", "x": 1}
    answer = gateway.client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == decoded(expected([ASSISTANT], 3))
    assert TOKENIZER.decode(target.engine.seen[-1].tokens.tolist()) == "hel\nlo"
