"""Log-probabilities and grammars in REST and gRPC: shapes, alignment with the text, and the target's requests."""

import itertools
import json

import openai
import pytest
from tokenizers import Tokenizer, decoders, models

from gateway.text.offsets import TextOffsets
from gateway.text.pieces import Pieces
from gateway.text.tokenizer import ModelTokenizer
from outrider.client import Client
from outrider.errors import InvalidRequest
from outrider.serving.messages import Grammar, GrammarKind
from tests.support.gateway.engines import EOS, VOCAB, expected
from tests.support.gateway.http import events
from tests.support.gateway.logprobs import CHAT_PROMPT, values
from tests.support.gateway.texts import HELLO, TOKENIZER

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def grpc_client(gateway):
    with Client(f"127.0.0.1:{gateway.grpc_port}") as client:
        yield client


# --- chats ---


def test_chats_have_an_object_for_each_token(client):
    answer = client.chat.completions.create(
        model="default", messages=HELLO, max_tokens=30, temperature=0, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert [entry.logprob for entry in content] == values(CHAT_PROMPT, 30)
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
    assert [entry.top_logprobs[0].token for entry in content] == [entry.token for entry in content]
    assert [entry.top_logprobs[1].token for entry in content[:-1]] == [entry.token for entry in content[1:]]
    assert {round(entry.logprob - entry.top_logprobs[1].logprob, 6) for entry in content} == {1.0}


@pytest.mark.usefixtures("proposals_in_time")
def test_streamed_chats_have_the_same_logprobs(client):
    ask = {"model": "default", "messages": HELLO, "max_tokens": 30, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**ask).choices[0]
    chunks = [c.choices[0] for c in client.chat.completions.create(**ask, stream=True)]
    content = [entry for c in chunks if c.logprobs for entry in c.logprobs.content]
    assert content == whole.logprobs.content
    assert all(entry.top_logprobs == [] for entry in content)
    assert all(c.logprobs is None for c in chunks if not c.delta.content)
    assert 1 < sum(c.logprobs is not None for c in chunks) < 30


def test_logprobs_are_absent_by_default(client, target):
    answer = client.chat.completions.create(model="default", messages=HELLO, max_tokens=3, logprobs=False)
    assert answer.choices[0].logprobs is None
    assert target.engine.seen[-1].logprobs is None


# --- completions ---


def test_completions_have_parallel_lists(client):
    choice = client.completions.create(model="default", prompt="A", max_tokens=20, temperature=0, logprobs=2).choices[0]
    parts = choice.logprobs
    assert parts.tokens == list("BCDEFGHIJKLMNOPQRSTU")
    assert parts.token_logprobs == values(1, 20)
    assert parts.text_offset == list(range(20))
    assert parts.top_logprobs[0] == {"B": -0.25, "C": -1.25}
    none = client.completions.create(model="default", prompt="A", max_tokens=2, temperature=0, logprobs=0).choices[0]
    assert none.logprobs.top_logprobs == [{"B": -0.25}, {"C": parts.token_logprobs[1]}]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_can_name_tokens_by_id(gateway, stream):
    names = [f"token_id:{token}" for token in TOKENIZER.encode("ABC").ids]
    sent = {"max_tokens": 2, "temperature": 0, "return_tokens_as_token_ids": True, "stream": stream}
    response = gateway.client.post("/v1/completions", json={"prompt": "A", "echo": True, "logprobs": 1, **sent})
    parts = [part["choices"][0]["logprobs"] for part in (events(response) if stream else [response.json()])]
    assert [name for one in parts if one for name in one["tokens"]] == names
    assert [offset for one in parts if one for offset in one["text_offset"]] == [0, 1, 2]
    assert [list(top) for one in parts if one for top in one["top_logprobs"] if top] == [[name] for name in names[1:]]
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2, **sent}
    response = gateway.client.post("/v1/chat/completions", json=body)
    parts = [part["choices"][0]["logprobs"] for part in (events(response) if stream else [response.json()])]
    entries = [entry for one in parts if one for entry in one["content"]]
    tokens = expected([3], 2)  # after the prompt's last token
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in tokens]
    assert entries[0]["top_logprobs"][1]["token"] == f"token_id:{tokens[0] + 1}"
    assert bytes(entries[0]["bytes"]).decode() == TOKENIZER.decode(tokens[:1])


REPORTED, REPORTED_OFFSETS = "naïve 🚀 日本", [0, 1, 2, 2, 3, 4, 5, *[6] * 4, 7, *[8] * 3, *[9] * 3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("sent", "text", "offsets"),
    [
        # ids: one for each byte but pairs of small letters; the answer's are bytes in the order of their characters
        ({"prompt": REPORTED, "echo": True, "max_tokens": 0}, REPORTED, REPORTED_OFFSETS),
        ({"prompt": TOKENIZER.encode("🚀").ids, "echo": True, "max_tokens": 0}, "🚀", [0] * 4),
        ({"prompt": "<|user|>é<|end|>x", "echo": True, "max_tokens": 0}, "<|user|>é<|end|>x", [0, 8, 8, 9, 16]),
        ({"prompt": [*TOKENIZER.encode("é").ids, 3, 7], "echo": True, "max_tokens": 0}, "é$", [0, 0, 1, 1]),
        ({"prompt": "A", "max_tokens": 6, "stop": ["DEF"]}, "BC", [0, 1, 2, 2, 2]),
        ({"prompt": "A", "max_tokens": 4, "stop": ["DEx"]}, "BCDE", [0, 1, 2, 3]),
        ({"prompt": "zA", "max_tokens": 2, "echo": True}, "zABC", [0, 1, 2, 3]),
    ],
)  # fmt: skip
def test_offsets_count_characters_of_the_text(gateway, sent, text, offsets, stream):
    """Tokens of one character begin with it, and none begins behind the text, be it cut at a stop string."""
    body = {"temperature": 0, "logprobs": 0, "stream": stream, **sent}
    response = gateway.client.post("/v1/completions", json=body)
    choices = [part["choices"][0] for part in (events(response) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == text
    lengths = itertools.accumulate(len(choice["text"]) for choice in choices)
    got = [
        (choice["logprobs"]["text_offset"], end)
        for choice, end in zip(choices, lengths, strict=True)
        if choice["logprobs"]
    ]
    assert [offset for own, _ in got for offset in own] == offsets
    assert all(offset <= end for own, end in got for offset in own)


def test_offsets_follow_a_tokenizer_of_words():
    """Its begin token and the space before the first word are not in the text."""
    words = models.WordLevel({"<s>": 0, "▁hello": 1, "▁wide": 2, "▁world": 3}, unk_token="<s>")
    made = Tokenizer(words)
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<s>"])
    tokenizer = ModelTokenizer({"tokenizer.json": made.to_str().encode()})
    offsets = TextOffsets(tokenizer, [0, 1, 2], "hello wide")
    assert [offsets.next(token) for token in (0, 1, 2, 3, 1)] == [0, 0, 5, 10, 16]
    offsets = TextOffsets(tokenizer, [0, 1, 2])
    assert [offsets.next(token) for token in (3, 0, 1)] == [0, 6, 6]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_an_empty_answer_are_empty_lists(client, stream):
    end = {"model": "default", "temperature": 0, "stream": stream}
    chat = client.chat.completions.create(
        **end, messages=[{"role": "user", "content": "x"}], logprobs=True, extra_body={"stop_token_ids": [4]}
    )
    text = client.completions.create(**end, prompt=[0], logprobs=1)
    if stream:
        assert not any(part.choices[0].logprobs for part in (*chat, *text))
        return
    assert (chat.choices[0].message.content, text.choices[0].text) == ("", "")
    assert chat.choices[0].logprobs.content == []
    lists = text.choices[0].logprobs
    assert (lists.tokens, lists.token_logprobs, lists.top_logprobs, lists.text_offset) == ([], [], [], [])


def test_logprobs_omit_a_stop_token(gateway):
    body = gateway.complete([VOCAB - 3], max_tokens=20, logprobs=0)
    assert len(body["choices"][0]["logprobs"]["tokens"]) == body["usage"]["completion_tokens"] - 1
    stopped = gateway.complete("A", max_tokens=20, logprobs=0, stop=["E"])["choices"][0]
    assert stopped["logprobs"]["tokens"] == list("BCDE")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_with_token_ids_logprobs_include_each_token(gateway, route, stream):
    """As those read it who train on answers: the prompt's ids, and a log-probability for each id of the answer."""
    chat = "chat" in route
    sent = (
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
        if chat
        else {"prompt": [7, 8], "logprobs": 0}
    )
    body = {"model": "default", "temperature": 0, "max_tokens": 30, "return_token_ids": True, "stream": stream, **sent}
    body["stop_token_ids"] = [12]
    response = gateway.client.post(route, json=body)
    parts = events(response) if stream else [response.json()]
    prompts = [part.get("prompt_token_ids") or part["choices"][0].get("prompt_token_ids") for part in parts]
    assert prompts[0] == ([2, *TOKENIZER.encode("x").ids, 3] if chat else [7, 8])
    assert not any(prompts[1:])
    choices = [part["choices"][0] for part in parts]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    assert tokens == list(range(4 if chat else 9, 13))
    parts = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content" if chat else "tokens"]]
    assert len(parts) == len(tokens)


def test_pieces_are_bytes():
    byte_level = Pieces(TOKENIZER, "ByteLevel")
    e_acute = TOKENIZER.encode("é").ids
    assert [byte_level[token] for token in e_acute] == [b"\xc3", b"\xa9"]
    assert [byte_level.text(token) for token in e_acute] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert [byte_level.text(token) for token in (EOS, VOCAB + 5)] == ["<|end|>", ""]
    other = Pieces(Tokenizer(models.BPE(vocab={"\u2581a": 0, "<0xE4>": 1, "b": 2}, merges=[])), None)
    assert [other[token] for token in range(3)] == [b" a", b"\xe4", b"b"]


def test_grpc_returns_logprobs_of_tokens_and_prompt(grpc_client):
    answer = grpc_client.complete("AK", max_tokens=12, temperature=0, logprobs=2, prompt_logprobs=1)
    assert answer.logprobs.logprobs == values(2, 12)
    assert [len(top) for top in answer.logprobs.top] == [2] * 12
    assert answer.logprobs.top[0] == [(answer.token_ids[0], -0.5), (answer.token_ids[1], -1.5)]
    assert answer.prompt_logprobs.logprobs == [-0.25]
    plain = grpc_client.complete("AK", max_tokens=2)
    assert plain.logprobs is plain.prompt_logprobs is None
    with pytest.raises(InvalidRequest):
        grpc_client.complete("AK", max_tokens=2, logprobs=21)


def json_of(schema):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


ANY = Grammar(GrammarKind.REGEX, "a+")
GRAMMARS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, json_of({"type": "object"})),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        json_of(SCHEMA),
    ),
    ({"json_schema": json.dumps(SCHEMA)}, json_of(SCHEMA)),
    ({"regex": "a+"}, ANY),
    ({"ebnf": 'root ::= "a"'}, Grammar(GrammarKind.EBNF, 'root ::= "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, json_of(SCHEMA)),
    ({"structured_outputs": {"choice": ["yes", 'n"o']}}, Grammar(GrammarKind.EBNF, 'start: "yes" | "n\\"o"')),
    ({"structured_outputs": {"regex": "a+", "json": None}}, ANY),
    ({"structured_outputs": {"json_object": True}}, json_of({"type": "object"})),
    ({"guided_json": SCHEMA}, json_of(SCHEMA)),
    ({"guided_regex": "a+"}, ANY),
    ({"guided_choice": ["a"]}, Grammar(GrammarKind.EBNF, 'start: "a"')),
    ({"guided_grammar": "start: A"}, Grammar(GrammarKind.EBNF, "start: A")),
]


# --- grammars ---


@pytest.mark.parametrize(("fields", "grammar"), GRAMMARS)
def test_grammars_reach_the_target(client, target, fields, grammar):
    client.chat.completions.create(model="default", messages=HELLO, max_tokens=2, temperature=0, extra_body=fields)
    assert target.engine.seen[-1].grammar == grammar
    client.completions.create(model="default", prompt="A", max_tokens=2, temperature=0, extra_body=fields)
    assert target.engine.seen[-1].grammar == grammar


LONG_TOOL = {"name": "f", "parameters": {"properties": {"a": {"enum": ["a" * 200_000]}}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format"),
        ({"json_schema": "{"}, "json_schema"),
        ({"regex": 5}, "regex"),
        ({"regex": ""}, "regex"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structural_tag": "a"}, "structural_tag"),
        ({"regex": "a" * 200_000}, "regex"),
        ({"regex": "wrong"}, "regex"),  # refused by the target
        ({"structured_outputs": {"regex": "wrong"}}, "structured_outputs"),
        ({"guided_grammar": "wrong"}, "guided_grammar"),
        ({"response_format": {"type": "json_object", "schema": {"title": "a" * 200_000}}}, "response_format"),
        ({"tools": [{"type": "function", "function": LONG_TOOL}], "tool_choice": "required"}, "tools"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_invalid_logprobs_and_grammars_are_refused_by_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="default", messages=HELLO, max_tokens=2, extra_body=fields)
    assert error.value.param == param


def test_grammars_over_grpc(grpc_client, target):
    for name, text in (("json_schema", "{}"), ("regex", "a+"), ("ebnf", "start: A")):
        grpc_client.complete("A", max_tokens=2, **{name: text})
        assert target.engine.seen[-1].grammar == Grammar(GrammarKind[name.upper()], text)
    for options in ({"regex": "a", "ebnf": "b"}, {"regex": "wrong"}):
        with pytest.raises(InvalidRequest):
            grpc_client.complete("A", max_tokens=2, **options)


def test_the_answer_is_the_same_with_and_without(gateway):
    assert gateway.complete("A", max_tokens=9, logprobs=1, return_token_ids=True)["choices"][0][
        "token_ids"
    ] == expected(TOKENIZER.encode("A").ids, 9)
