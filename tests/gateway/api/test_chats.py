"""Chats over real sockets: with the client of OpenAI, and what reaches the chat template."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.client import Client
from tests.support.gateway.engines import VOCAB, expected, tokenizer_files
from tests.support.gateway.services import Gateway, Service, Target
from tests.support.gateway.texts import HELLO, TOKENIZER, decoded, ids

ASSISTANT = 3  # the last token of a rendered conversation


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
