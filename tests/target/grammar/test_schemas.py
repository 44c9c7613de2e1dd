"""What grammars of JSON schemas and GBNF allow: blanks, properties, formats, alternatives, escapes."""

import itertools
import json

import pytest

from outrider.errors import InvalidRequest
from outrider.serving.messages import Grammar, GrammarKind
from services.target.grammar.closed_objects import closed
from services.target.grammar.matcher import Grammars, Matcher
from services.target.grammar.string_formats import KNOWN, understood
from tests.support.tiny import EOS, VOCAB

A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}


def matcher_of(folder, schema, kind=GrammarKind.JSON_SCHEMA):
    """What a session would follow that asks for a schema, or a grammar of another kind."""
    grammars = Grammars(folder / "tokenizer.json", VOCAB, [EOS])
    grammars.request(1, Grammar(kind, json.dumps(schema) if kind == GrammarKind.JSON_SCHEMA else schema))
    grammars.wait(60)
    ((_, grammar, start),) = grammars.ready()
    if isinstance(start, InvalidRequest):
        raise start
    return Matcher(start, grammar, [])


@pytest.mark.parametrize(
    ("guidance", "most"),
    [
        ({}, 64),  # blanks come to an end, or a model may write nothing else until its tokens are spent
        ({"x-guidance": {"whitespace_flexible": True}}, 500),
        ({"x-guidance": {"whitespace_flexible": False}}, 0),
        ({"x-guidance": {"whitespace_pattern": "[ ]{3}"}}, 3),
        ({"x-guidance": {"lenient": True}}, 64),
    ],
)
def test_blanks_between_the_parts_of_json_come_to_an_end(folder, tokenizer, guidance, most):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    matcher = matcher_of(folder, schema | guidance)
    for blanks in (most, 65):
        fits = matcher.admits(tokenizer.encode("{" + " " * blanks + '"a":1}').ids)
        assert fits == (blanks <= most), blanks


NESTED = {"properties": {"properties": {"type": "array", "items": {"$ref": "#/$defs/A"}}}, "$defs": {"A": A}}


EITHER = {"anyOf": [A, B]}
BOTH_FORMS = {
    "prefixItems": [{"allOf": [{"$ref": "#/$defs/A"}, B]}],
    "items": {"$ref": "#/$defs/A"},
    "$defs": {"A": A},
}
RECURSIVE = {
    "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"name": {}, "children": {"items": {"$ref": "#"}}}}],
    "$defs": {"Base": {"properties": {"value": {"type": "integer"}}}},
}


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        (A, '{"a":1}', '{"a":1,"b":2}'),
        (EITHER, '{"b":2}', '{"a":1,"b":2}'),
        (NESTED, '{"properties":[{"a":1}]}', '{"properties":[{"c":1}]}'),
        (NESTED, "{}", '{"c":1}'),
        ({"prefixItems": [A], "items": B}, '[{"a":1},{"b":2}]', '[{"a":1},{"a":2}]'),
        ({"properties": {"x": {"additionalProperties": A}}}, '{"x":{"y":{"a":1}}}', '{"x":{"y":{"b":1}}}'),
        (A | {"required": ["a", "b"]}, '{"a":1,"b":[2]}', '{"a":1}'),
        (A | {"required": ["b"]}, '{"a":1,"b":[2]}', '{"b":2,"c":3}'),
        (A | {"required": ["b"], "minProperties": 2}, '{"a":1,"b":[2]}', '{"a":1,"b":2,"c":3}'),
        ({"type": "object", "properties": {}}, "{}", '{"a":1}'),
        ({"properties": {"o": {"type": "object", "properties": {}}}, "required": ["o"]}, '{"o":{}}', '{"o":{"a":1}}'),
        ({"items": {"properties": {}}}, "[{},{}]", '[{"a":1}]'),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, '{"a":1,"b":2}', '{"a":1,"b":2,"c":3}'),
        ({"allOf": [B, {"allOf": [A]}], "required": ["c"]}, '{"b":1,"a":2,"c":[3]}', '{"b":1,"a":2,"c":3,"d":4}'),
        ({"allOf": [A], "title": "one part"}, '{"a":1}', '{"a":1,"c":3}'),
        ({"$ref": "#/$defs/A", **B, "$defs": {"A": A}}, '{"a":1,"b":2}', '{"c":3}'),
        ({"$ref": "#/$defs/A", "required": ["b"], "$defs": {"A": A}}, '{"a":1,"b":[2]}', '{"a":1,"b":[2],"c":3}'),
        (A | {"anyOf": [B, {"required": ["c"]}]}, '{"a":1,"b":2,"c":[3]}', '{"a":1,"b":2,"d":4}'),
        (BOTH_FORMS, '[{"a":1,"b":2},{"a":1}]', '[{"a":1,"b":2},{"a":1,"b":2}]'),
        (BOTH_FORMS, '[{"a":1,"b":2}]', '[{"a":1,"b":2,"c":3}]'),
        (RECURSIVE, '{"value":1,"name":[],"children":[{"value":2,"name":[]}]}', '{"value":1,"name":[],"more":1}'),
        (RECURSIVE, '{"value":1,"children":[{"value":2}]}', '{"value":1,"children":[{"value":2,"more":1}]}'),
    ],
)
def test_objects_have_the_properties_that_are_named(folder, tokenizer, schema, fits, does_not):
    before, matcher = json.dumps(schema), matcher_of(folder, schema)
    assert matcher.admits(tokenizer.encode(fits).ids)
    assert not matcher.admits(tokenizer.encode(does_not).ids)
    assert closed(schema) != schema
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        A | {"additionalProperties": True},
        A | {"patternProperties": {"^z": {"type": "integer"}}},
        A | {"required": ["a"], "minProperties": 2},
        {"allOf": [A | {"additionalProperties": True}, B]},
        {"allOf": [A | {"additionalProperties": False}, B]},
        {"allOf": [A, {"patternProperties": {"^z": {"type": "integer"}}}]},
        {"allOf": [{"$ref": "#/items"}, B], "items": A},
        {"allOf": [{"type": "string"}, {"maxLength": 3}]},
        {"type": "object"},
        {"type": "object", "properties": ["a"]},
        {"properties": {}, "additionalProperties": {"type": "integer"}},
        {"properties": {}, "minProperties": 1},
        True,
    ],
)
def test_schemas_stay_open_if_declared_or_extended(schema):
    assert closed(schema) == schema


@pytest.mark.parametrize("optional", [0, 1, 3])
@pytest.mark.parametrize("required", [0, 1])
@pytest.mark.parametrize(("least", "most"), [(1, None), (2, None), (0, 0), (0, 1), (1, 1), (1, 2), (2, 3)])
def test_numbers_of_properties_are_kept(folder, tokenizer, required, optional, least, most):
    """Names come in the order of the schema and differ, so that a number of them is a number of properties."""
    names = "abcd"[: required + optional]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    schema |= {"minProperties": least, **({} if most is None else {"maxProperties": most})}
    schema |= {"required": list(names[:required]), "additionalProperties": False}
    some = [chosen for size in range(len(names) + 1) for chosen in itertools.combinations(names, size)]
    right = {one for one in some if required <= sum(x in one for x in names[:required])}
    right = {one for one in right if least <= len(one) <= (len(names) if most is None else most)}
    if not right:
        with pytest.raises(InvalidRequest):
            matcher_of(folder, schema)
        return
    matcher = matcher_of(folder, schema)
    for one in some:
        text = "{" + ",".join(f'"{name}":1' for name in one) + "}"
        assert matcher.admits([*tokenizer.encode(text).ids, EOS]) == (one in right), text
    assert not matcher.admits(tokenizer.encode('{"b":1,"b":1').ids)


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
        ({"type": "object", "minProperties": 2, "required": ["a"]}, '{"a":1,"b":1}', '{"a":1,"a":1}'),
        ({"$ref": "#/$defs/A", "$defs": {"A": A | {"minProperties": 1}}}, '{"a":1}', "{}"),
        ({"type": "array", "uniqueItems": False}, "[1,1]", "{}"),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, "[1]", "[1,1]"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "[1,1]", "{}"),
        ({"propertyNames": {"type": "string"}, "type": "object"}, '{"a":1}', "[]"),
        (
            {"properties": {"not": {"type": "integer"}, "uniqueItems": {}}},
            '{"not":1,"uniqueItems":[1,1]}',
            '{"not":""}',
        ),
    ],
)
def test_keywords_that_leave_nothing_to_enforce_are_accepted(folder, tokenizer, schema, fits, does_not):
    before, matcher = json.dumps(schema), matcher_of(folder, schema)
    assert matcher.admits([*tokenizer.encode(fits).ids, EOS])
    assert not matcher.admits([*tokenizer.encode(does_not).ids, EOS])
    assert json.dumps(schema) == before


COLOURS = {"enum": ["red", "green", "blue"]}


def texts(values):
    """Short lists of some values as JSON, and whether none is repeated."""
    every = [one for size in range(len(values) + 2) for one in itertools.product(values, repeat=size)]
    return {json.dumps(one, separators=(",", ":")): len(set(one)) == len(one) for one in every}


@pytest.mark.parametrize(
    ("schema", "cases"),
    [
        ({"type": "array", "items": COLOURS, "uniqueItems": True}, texts(COLOURS["enum"])),
        (
            {"items": {"$ref": "#/$defs/C"}, "uniqueItems": True, "$defs": {"C": COLOURS}},
            {'["red","red"]': False, "7": True},
        ),
        ({"type": ["array", "null"], "items": COLOURS, "uniqueItems": True}, {"null": True, '["red","red"]': False}),
        (
            {"type": "array", "items": {"enum": list(range(26))}, "uniqueItems": True, "maxItems": 2},
            {"[25,3]": False, "[3,25]": True},
        ),
        (
            {"type": "array", "items": {"enum": list(range(16))}, "uniqueItems": True, "maxItems": 2},
            {"[15,3]": True, "[3]": True, "[]": True, "[3,3]": False, "[1,2,3]": False},
        ),
        (
            {
                "type": "array",
                "items": {"anyOf": [{"type": "boolean"}, {"const": None}]},
                "uniqueItems": True,
                "minItems": 2,
            },
            {"[true,null]": True, "[null,true,false]": True, "[true]": False, "[true,true]": False},
        ),
        (
            {"items": {"type": "integer", "minimum": 1, "maximum": 8}, "type": "array", "uniqueItems": True},
            {"[1,3,8]": True, "[3,1]": False, "[1,2,3,4,5,6,7,8]": True, "[2,2]": False},
        ),
        ({"type": "array", "items": {"enum": [1, 1.0, True]}, "uniqueItems": True}, {"[1,true]": True, "[1,1]": False}),
    ],
)
def test_items_differ_where_they_have_few_values(folder, tokenizer, schema, cases):
    matcher = matcher_of(folder, schema)
    for text, fits in cases.items():
        assert matcher.admits([*tokenizer.encode(text).ids, EOS]) == fits, text


NAMES = {"type": "object", "additionalProperties": {"type": "integer"}}
OPEN = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        (
            NAMES | {"propertyNames": {"enum": ["x", "y"]}},
            ['{"x":1,"y":2}', '{"y":1}', "{}"],
            ['{"z":1}', '{"x":1,"x":1}'],
        ),
        (NAMES | {"propertyNames": {"enum": ["x", "y"]}, "minProperties": 2}, ['{"x":1,"y":2}'], ['{"y":1}']),
        (NAMES | {"propertyNames": {"pattern": "^x"}}, ['{"xa":1}', "{}"], ['{"ax":1}']),
        (OPEN | {"propertyNames": {"enum": ["a", "c"]}}, ['{"a":1,"c":2}'], ['{"b":1}', '{"d":1}']),
        (
            OPEN | {"minProperties": 2},
            ['{"a":1,"b":1}', '{"a":1,"z":1}', '{"b":1,"z":1,"y":1}'],
            ['{"z":1,"z":1}', '{"b":1}'],
        ),
        (OPEN | {"minProperties": 3}, ['{"a":1,"b":1,"z":1}'], ['{"a":1,"b":1}', '{"a":1,"z":1,"z":1}']),
        (
            OPEN | {"minProperties": 3, "required": ["c"]},
            ['{"a":1,"b":1,"c":1}'],
            ['{"a":1,"c":1}', '{"c":1,"z":1,"z":1}'],
        ),
    ],
)
def test_names_of_properties_are_counted_once(folder, tokenizer, schema, fits, does_not):
    matcher = matcher_of(folder, schema)
    for text in fits + does_not:
        assert matcher.admits([*tokenizer.encode(text).ids, EOS]) == (text in fits), text


LISTS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (LISTS, "`uniqueItems` cannot be enforced"),
        ({"properties": {"tags": LISTS}}, "`properties.tags.uniqueItems` cannot be enforced"),
        ({"anyOf": [A, {"not": A}]}, "`anyOf.1.not` cannot be enforced"),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": {"items": {"propertyNames": {"minLength": 2}}}}},
            "`$defs.A.items.propertyNames` cannot",
        ),
        (
            {"items": {"enum": list(range(20))}, "uniqueItems": True},
            "`uniqueItems` cannot be enforced by this server with 20",
        ),
        ({"type": "object", "minProperties": 2}, "`minProperties` cannot be enforced by this server above 1 where"),
        (
            {"items": {"required": ["a"], "minProperties": 3}},
            "`items.minProperties` cannot be enforced by this server above 2",
        ),
        (OPEN | {"minProperties": 4}, "`minProperties` cannot be enforced by this server above 3"),
        (
            {"properties": {name: {} for name in "abcdefghijkl"}, "minProperties": 6},
            "`minProperties` cannot be enforced",
        ),
    ],
)
def test_keywords_that_cannot_be_enforced_are_refused_by_their_place(folder, schema, words):
    with pytest.raises(InvalidRequest) as error:
        matcher_of(folder, schema)
    assert words in error.value.message
    assert error.value.param == "json_schema"


@pytest.mark.parametrize("number", [-(2**63), -(2**63) + 1, -(2**63) - 1, 10**400])
def test_numbers_that_would_crash_the_compiler_are_refused(folder, number):
    with pytest.raises(InvalidRequest, match="beyond those that grammars can hold"):
        matcher_of(folder, {"properties": {"a": {"enum": [1, [number]]}}})


def test_unknown_formats_are_ignored(folder, tokenizer):
    strings = {
        "secret": {"type": ["string", "null"], "format": "password"},
        "format": {"allOf": [{"$ref": "#/components/schemas/Path"}]},
        "default": {"anyOf": [{"type": "string", "format": "date"}, {"const": {"format": "byte"}}]},
    }
    path = {"Path": {"type": "string", "format": "file-path"}}
    schema = {"type": "object", "properties": strings, "required": list(strings), "components": {"schemas": path}}
    before, matcher = json.dumps(schema), matcher_of(folder, schema)
    for last, fits in (('"2020-02-03"', True), ('{"format":"byte"}', True), ('"today"', False), ("{}", False)):
        text = '{"secret":"a","format":"b","default":' + last + "}"
        assert matcher.admits(tokenizer.encode(text).ids) == fits, last
    assert json.dumps(schema) == before


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_formats_that_are_known_stay(folder, name):
    schema = {"type": "string", "format": name}
    assert understood(schema) == schema
    matcher_of(folder, schema)


@pytest.mark.parametrize(
    ("schema", "fit", "does_not"),
    [
        ({"oneOf": [{"const": 1, "title": "low"}, {"const": 22}]}, ["1", "22"], "3"),
        ({"oneOf": [{"type": "integer", "minimum": 0, "maximum": 3}, {"const": 7}]}, ["2", "7"], "8"),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [3]}], "x-guidance": {"whitespace_flexible": False}}, ["2", "3"], "4"),
        ({"oneOf": [A | {"required": ["a"]}, B | {"required": ["b"]}]}, ['{"a":1}', '{"b":1}'], '{"a":1,"b":1}'),
    ],
)
def test_alternatives_that_may_not_exclude_one_another_are_followed(folder, tokenizer, schema, fit, does_not):
    matcher = matcher_of(folder, schema)
    assert all(matcher.admits(tokenizer.encode(text).ids) for text in fit)
    assert not matcher.admits(tokenizer.encode(does_not).ids)


@pytest.mark.parametrize(
    ("text", "fits", "does_not"),
    [
        (r'root ::= "caf\u00e9" [\u00c0-\u00ff\u0041\u2028]{4}', "café\u00c0\u00ffA\u2028", "caf\u00e9B"),
        (r'root ::= "\[" [a\[\]]{2} "\]\""', '[a]]"', "[ab"),
        (r'root ::= "\U0001F600\u0022\u005c"', '\U0001f600"\\', "\U0001f600x"),
        (r"""root ::= [+\-*\]\^]+ "it\'s" "\\u0041" """, r"*-]^it's\u0041", ","),
        ('root ::= start " start" # start "\nstart ::= [start]', "s start", "e"),
        ('root ::= ab AB a-b a_b aB\nab ::= "1"\nAB ::= "2"\na-b ::= "3"\na_b ::= "4"\naB ::= "5"', "12345", "11"),
        (r'start: "\u00e9" /[\u00e0-\u00ff]/', "\u00e9\u00e0", "\u00e9a"),
        ('root ::= (([0-9]+))? "a" ([0-9]{2}){2} # (b*)*\n', "1a2345", "ab"),
        ('root ::= ( # all\n ((x b)+) ? # it\n)* "(c+)?"\nx ::= "1" root? "2"\nb ::= "b"', "12b12b(c+)?", "c"),
        ('root ::= (x+)? "a"\nx ::= "[" (x | "." [*+]+)* "]"', "[[].+*][]a", "[.]"),
    ],
)
def test_gbnf_escapes_and_rule_names_are_supported(folder, tokenizer, text, fits, does_not):
    matcher = matcher_of(folder, text, GrammarKind.EBNF)
    assert matcher.admits(tokenizer.encode(fits).ids)
    assert not matcher.admits(tokenizer.encode(does_not).ids)
