"""Whitespace in JSON that must match a schema: free or disabled."""

import contextlib
import json

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from gateway.api.requests.grammars import FIELDS, grammar_of
from outrider.errors import InvalidRequest
from tests.support.gateway.engines import tokenizer, tokenizer_files

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
COMPACT = {"disable_any_whitespace": True}


def allows(grammar, text):
    matcher = LLMatcher(LLTokenizer(tokenizer_files()["tokenizer.json"].decode()), grammar_from("json_schema", grammar))
    ids = tokenizer().encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids)


@pytest.mark.parametrize(
    ("fields", "compact"),
    [
        ({"structured_outputs": {"json": SCHEMA, **COMPACT}}, True),
        ({"response_format": FORMAT, "structured_outputs": COMPACT}, True),
        ({"guided_json": SCHEMA, "structured_outputs": {"disable_any_whitespace": False}}, False),
        ({"response_format": FORMAT}, False),
    ],
)
def test_whitespace_can_be_disabled(fields, compact):
    text = grammar_of(fields).text
    assert allows(text, '{"a":1}')
    assert allows(text, '{"a": 1}') is not compact


def test_json_object_may_have_a_schema():
    """As llama.cpp has it; an object of any kind would not be what was asked for."""
    grammar = grammar_of({"response_format": {"type": "json_object", "schema": SCHEMA}})
    assert json.loads(grammar.text) == SCHEMA
    assert grammar_of({"response_format": {"type": "json_object", "schema": None}}).text == '{"type": "object"}'
    with pytest.raises(InvalidRequest, match=r"response_format\.schema must be a JSON schema"):
        grammar_of({"response_format": {"type": "json_object", "schema": 7}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"json": {"x-guidance": 5}, **COMPACT}}, "x-guidance.*must be an object, not 5"),
        ({"regex": ""}, "regex is empty"),
        ({"guided_grammar": ""}, "guided_grammar is empty"),
        ({"guided_choice": []}, "list of choices is empty"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "choice 1 is an empty text"),
        ({"guided_choice": "a"}, "must be a list"),
    ],
)
def test_messages_name_what_is_wrong(fields, message):
    with pytest.raises(InvalidRequest, match=message) as error:
        grammar_of(fields)
    assert error.value.param in fields


ODD = (None, 5, -0.5, True, False, "", "x", "{", "[]", [], [[]], [None], {}, {"a": {}}, {"type": []}, {"schema": 5})


@pytest.mark.parametrize("name", FIELDS)
def test_odd_values_are_refused_or_read_but_no_bug(name):
    keys = ("json", "regex", "choice", "grammar", "json_object", "type", "schema", "json_schema", "x-guidance")
    odd = [*ODD, *({key: value} for key in keys for value in ODD)]
    odd += [{"type": "json_schema", "json_schema": value} for value in odd]
    for value in odd:
        for options in (None, COMPACT, 5, []):
            with contextlib.suppress(InvalidRequest):
                grammar_of({"structured_outputs": options, name: value})


def test_other_grammars_ignore_the_whitespace_option():
    assert grammar_of({"structured_outputs": {"regex": "a +b", **COMPACT}}).text == "a +b"
    assert grammar_of({"structured_outputs": COMPACT}) is None
    assert json.loads(grammar_of({"structured_outputs": {"json": True, **COMPACT}}).text)["x-guidance"]
    with pytest.raises(InvalidRequest, match="disable_any_whitespace"):
        grammar_of({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": 1}})
    with pytest.raises(InvalidRequest, match="whitespace_pattern"):
        grammar_of({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}})
