"""JSON that must match a schema: its whitespace, the model's choice or none, and properties that nobody named."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from gateway.api.grammars import grammar_of
from outrider.errors import InvalidRequest
from tests.gateway.engines import tokenizer, tokenizer_files

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
def test_whitespace_can_be_left_out(fields, compact):
    text = grammar_of(fields).text
    assert allows(text, '{"a":1}')
    assert allows(text, '{"a": 1}') is not compact


def test_other_forms_have_none_to_leave_out():
    assert grammar_of({"structured_outputs": {"regex": "a +b", **COMPACT}}).text == "a +b"
    assert grammar_of({"structured_outputs": COMPACT}) is None
    assert json.loads(grammar_of({"structured_outputs": {"json": True, **COMPACT}}).text)["x-guidance"]
    with pytest.raises(InvalidRequest, match="disable_any_whitespace"):
        grammar_of({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": 1}})
    with pytest.raises(InvalidRequest, match="whitespace_pattern"):
        grammar_of({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}})


A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
NESTED = {"properties": {"properties": {"type": "array", "items": {"$ref": "#/$defs/A"}}}, "$defs": {"A": A}}
EITHER = {"anyOf": [A, B]}


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        (A, '{"a":1}', '{"a":1,"b":2}'),
        (EITHER, '{"b":2}', '{"a":1,"b":2}'),
        (NESTED, '{"properties":[{"a":1}]}', '{"properties":[{"c":1}]}'),
        (NESTED, "{}", '{"c":1}'),
        ({"prefixItems": [A], "items": B}, '[{"a":1},{"b":2}]', '[{"a":1},{"a":2}]'),
        ({"properties": {"x": {"additionalProperties": A}}}, '{"x":{"y":{"a":1}}}', '{"x":{"y":{"b":1}}}'),
    ],
)
def test_objects_have_the_properties_that_are_named(schema, fits, does_not):
    before = json.dumps(schema)
    for field in (
        {"guided_json": schema},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    ):
        text = grammar_of(field).text
        assert allows(text, fits)
        assert not allows(text, does_not)
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        A | {"additionalProperties": True},
        A | {"patternProperties": {"^z": {"type": "integer"}}},
        A | {"anyOf": [B, {"required": ["c"]}]},
        {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
        {"$ref": "#/$defs/A", **B, "$defs": {"A": A}},
        {"type": "object"},
        {"type": "object", "properties": {}},
        True,
    ],
)
def test_schemas_stay_open_that_say_so_or_that_others_add_to(schema):
    assert json.loads(grammar_of({"json_schema": schema}).text) == schema
