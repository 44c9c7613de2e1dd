"""Tools of a request: which definitions and choices are allowed, and how templates get them."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from gateway.api.requests.messages import Message
from gateway.api.requests.tools import Tools, describe_tools, tools_of
from gateway.api.routes.conversations import Conversations
from gateway.parsers.tool_calls import (
    HermesParser,
)
from gateway.text.tokenizer import ModelTokenizer
from outrider.config import GatewayOptions
from outrider.errors import InvalidRequest
from tests.support.gateway.engines import EOS, VOCAB, tokenizer, tokenizer_files
from tests.support.gateway.reading import read

F = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {}}}}
TOOLS = [{"type": "function", "function": F}, {"type": "function", "name": "g"}]


def test_tools_and_choices():
    assert tools_of(None, "auto", None) is None
    assert tools_of([], None, None) is None
    assert tools_of(TOOLS, "none", None) is None
    assert tools_of(TOOLS, None, False) == Tools([F, {"name": "g"}], parallel=False)
    assert tools_of(TOOLS, {"type": "function", "function": {"name": "g"}}, None).named == "g"
    schema = json.loads(tools_of(TOOLS, "required", False).grammar().text)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]] == ["f", "g"]
    assert (
        json.loads(tools_of(TOOLS, {"type": "function", "name": "f"}, None).grammar().text).items()
        >= F["parameters"].items()
    )


@pytest.mark.parametrize("key", ["$defs", "definitions"])
def test_each_tool_keeps_definitions_of_its_own(key):
    """Definitions of two tools may have the same name. Checked with the targets' grammar compiler."""
    kinds = {"a": {"type": "integer"}, "b": {"enum": ["yes", "no"]}}
    tools = [
        {"type": "function", "name": name, "parameters": {
            "type": "object", "properties": {"x": {"$ref": f"#/{key}/Item"}, "y": {"$ref": "#"}}, "required": ["x"],
            key: {"Item": kind},
        }}
        for name, kind in kinds.items()
    ]  # fmt: skip
    grammar = tools_of(tools, "required", None).grammar().text
    tokens = LLTokenizer(tokenizer().to_str(), n_vocab=VOCAB, eos_token=EOS)
    right = '[{"name": "a", "parameters": {"x": 7, "y": {"x": 8}}}, {"name": "b", "parameters": {"x": "no"}}]'
    wrong = '[{"name": "a", "parameters": {"x": "no"}}]', '[{"name": "b", "parameters": {"x": 7}}]'
    for text, fits in ((right, True), *((text, False) for text in wrong)):
        matcher = LLMatcher(tokens, grammar_from("json_schema", grammar))
        assert not matcher.get_error()
        ids = tokens.tokenize_str(text)
        assert (matcher.validate_tokens(ids) == len(ids)) is fits, text


def test_additional_arguments_are_forbidden_unless_the_schema_allows_them():
    for own, allowed in (({}, False), ({"additionalProperties": True}, True)):
        tool = {"type": "function", "name": "h", "parameters": {"type": "object", "properties": {"a": {}}, **own}}
        named = tools_of([tool], {"type": "function", "name": "h"}, None)
        assert json.loads(named.grammar().text)["additionalProperties"] is allowed


DRAFT = {"$schema": "http://json-schema.org/draft-07/schema#"}
NO_PARAMETERS = [
    {}, {"parameters": None}, {"parameters": {}}, {"parameters": {"type": "object"}},
    {"parameters": {"type": "object", "properties": {}}}, {"parameters": {"type": "object", "properties": None}},
    {"parameters": {"type": "object", "properties": {}, "required": [], "title": "None", **DRAFT}},
]  # fmt: skip


@pytest.mark.parametrize("parameters", NO_PARAMETERS)
@pytest.mark.parametrize("others", [[], [{"name": "g", "parameters": {"allOf": [{"properties": {"a": {}}}]}}]])
def test_a_function_without_parameters_is_called_with_none(parameters, others):
    """Also beside one whose schema keeps the targets from closing objects. Checked with their grammar compiler."""
    tokens = LLTokenizer(tokenizer().to_str(), n_vocab=VOCAB, eos_token=EOS)
    tools = [{"type": "function", "function": one} for one in ({"name": "f", **parameters}, *others)]
    named = {"type": "function", "function": {"name": "f"}}
    for choice, form in ((named, "{}"), ("required", '[{{"name": "f", "parameters": {}}}]')):
        grammar = tools_of(tools, choice, None).grammar().text
        start = LLMatcher(tokens, grammar_from("json_schema", grammar))
        assert not start.get_error()
        for arguments in ("{}", '{"a": 1}', '{", ": 1}', "null"):
            ids = [*tokens.tokenize_str(form.format(arguments)), EOS]
            assert (start.deep_copy().validate_tokens(ids) == len(ids)) is (arguments == "{}"), arguments


def test_parameters_that_are_not_listed_stay_possible():
    """Those of a schema that allows, requires or composes them."""
    for parameters, own in (
        ({"additionalProperties": {"type": "integer"}}, {"additionalProperties": {"type": "integer"}}),
        ({"properties": {}, "additionalProperties": True}, {"additionalProperties": True}),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {}),
        ({"required": ["a"]}, {"properties": {"a": {}}, "additionalProperties": False}),
        (
            {"properties": {"b": {}}, "required": ["a"]},
            {"properties": {"b": {}, "a": {}}, "additionalProperties": False},
        ),
    ):
        tool = {"type": "function", "name": "h", "parameters": parameters}
        schema = json.loads(tools_of([tool], {"type": "function", "name": "h"}, None).grammar().text)
        del schema["x-guidance"]
        assert schema == {"type": "object"} | parameters | own


@pytest.mark.parametrize("parameters", [{"properties": {"a": {"type": "integer"}}}, {}, None])
def test_arguments_are_an_object_without_a_type_in_the_schema(parameters):
    tokens = LLTokenizer(tokenizer().to_str(), n_vocab=VOCAB, eos_token=EOS)
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for choice, form in (
        ({"type": "function", "function": {"name": "f"}}, "{}"),
        ("required", '[{{"name": "f", "parameters": {}}}]'),
    ):
        grammar = tools_of([tool], choice, None).grammar().text
        for arguments in ("{}", "5", '"a"', "null", "[]"):
            ids = tokens.tokenize_str(form.format(arguments))
            fits = LLMatcher(tokens, grammar_from("json_schema", grammar)).validate_tokens(ids) == len(ids)
            assert fits is (arguments == "{}"), arguments


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        (None, "required", "tool_choice"),
        (TOOLS, "sometimes", "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "h"}}, "tool_choice"),
        (TOOLS, {"function": {"name": "h"}}, "tool_choice"),
        (TOOLS, {"type": None}, "tool_choice"),
        (TOOLS, {}, "tool_choice"),
        ([{"type": "web_search"}], None, "tools.0"),
        ([{"type": "function", "function": {}}], None, "tools.0"),
        ([*TOOLS, *TOOLS], None, "tools"),
    ],
)
def test_errors_in_tools_name_the_field(tools, choice, param):
    with pytest.raises(InvalidRequest) as error:
        tools_of(tools, choice, None)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("sent", "rendered"),
    [(None, {}), ("", {}), ({}, {}), ("{}", {}), ('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("a(", "a(")],
)
def test_earlier_calls_are_rendered_with_arguments_as_objects(sent, rendered):
    """Some clients send null for a function without arguments."""
    call = {"function": {"name": "f", "arguments": sent}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    assert message.rendered()["tool_calls"][0]["function"] == {"name": "f", "arguments": rendered}


def test_a_function_may_be_named_without_its_type():
    assert tools_of(TOOLS, {"function": {"name": "g"}}, None).named == "g"


def test_a_template_without_tools_gets_them_as_text():
    tools = tools_of(TOOLS, None, None)
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    described = describe_tools(messages, tools)
    assert [message["role"] for message in described] == ["system", "user", "assistant"]
    assert '"name": "g"' in described[0]["content"]
    assert read(HermesParser, described[2]["content"], 1000) == ("", [("f", '{"x": 1}')])
    joined = describe_tools([{"role": "system", "content": "be kind"}, *messages], tools)
    assert joined[0]["content"].startswith("be kind\n\nYou can call")
    assert describe_tools(messages, None)[0] == messages[0]


async def test_a_template_for_tools_is_used_for_tools():
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    tokenizer = ModelTokenizer(tokenizer_files(named))

    conversations = Conversations(tokenizer, GatewayOptions())
    messages = [Message(role="user", content="hi")]
    prompts = [await conversations.prompt(messages, tools, {}) for tools in (None, tools_of(TOOLS, None, None))]
    assert [tokenizer.decode(tokens) for tokens in prompts] == ["d", "f"]
