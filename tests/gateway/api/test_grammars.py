"""Whitespace in JSON that must match a schema: free or disabled."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from gateway.api.requests.grammars import grammar_of
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


def test_other_grammars_ignore_the_whitespace_option():
    assert grammar_of({"structured_outputs": {"regex": "a +b", **COMPACT}}).text == "a +b"
    assert grammar_of({"structured_outputs": COMPACT}) is None
    assert json.loads(grammar_of({"structured_outputs": {"json": True, **COMPACT}}).text)["x-guidance"]
    with pytest.raises(InvalidRequest, match="disable_any_whitespace"):
        grammar_of({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": 1}})
    with pytest.raises(InvalidRequest, match="whitespace_pattern"):
        grammar_of({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}})
