"""Tools of a chat: validation, the variables of the chat template, and the grammar of forced calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.parsers.base import CallParser
from gateway.parsers.output import CallFormat, call_parser
from gateway.parsers.tool_calls import JsonCallsParser, NamedCallParser
from outrider.errors import InvalidRequest
from outrider.serving.messages import Grammar, GrammarKind

MAX_TOOLS = 128
# Whitespace as written by json.dumps: with free whitespace, weak models write nothing else.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords beside which a schema without properties has no other ones.
_PLAIN = {"type", "properties", "required", "title", "description", "$schema", "$id", "$comment", "strict", "$defs"}
_VALUES = {"const", "enum", "default", "examples"}  # keywords whose values are not schemas

_INTRODUCTION = (
    "You can call these tools, each described as JSON on a line of its own:\n{tools}\n"
    "To call one, answer with a line of this form, for each call one, and nothing else:\n"
    '<tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call>'
)


@dataclass(frozen=True)
class Tools:
    """The tools of a request. required: the model must call one. named: it must call this one."""

    functions: Sequence[dict[str, Any]]
    required: bool = False
    named: str | None = None
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """True if the answer consists of calls only."""
        return self.required or self.named is not None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [{"type": "function", "function": function} for function in self.functions]

    def grammar(self) -> Grammar | None:
        """The grammar of forced calls; None if calls are optional."""
        if self.named is not None:
            schema = _arguments(next(f for f in self.functions if f["name"] == self.named))
            return _grammar(schema)
        if not self.required:
            return None
        calls: list[dict[str, Any]] = []
        for index, function in enumerate(self.functions):
            parameters = _relocated(_arguments(function), f"#/items/anyOf/{index}/properties/parameters")
            calls.append({
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            })  # fmt: skip
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        schema |= {} if self.parallel else {"maxItems": 1}
        return _grammar(schema)

    def parser(self, form: CallFormat) -> CallParser:
        """A parser of the calls in an answer."""
        if self.named is not None:
            return NamedCallParser(self.named)
        return JsonCallsParser() if self.required else call_parser(form, {one["name"] for one in self.functions})


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    """Schema of a function's arguments, which are an object even if the schema omits that.

    Additional properties are forbidden unless the schema allows them, because weak models invent some. A function
    whose schema has no properties has none but those that it requires.
    """
    parameters = function.get("parameters") or {}
    properties, names = parameters.get("properties") or {}, parameters.get("required")
    if not isinstance(properties, dict) or (not properties and parameters.keys() - _PLAIN):
        return {"type": "object"} | parameters
    required = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    named = {"properties": properties | {name: {} for name in required if name not in properties}}
    return {"type": "object", "additionalProperties": False} | parameters | named


def _relocated(schema: Any, to: str) -> Any:
    """A schema embedded in another one at a JSON pointer, with its internal references adapted."""
    if isinstance(schema, list):
        return [_relocated(part, to) for part in schema]
    if not isinstance(schema, dict):
        return schema
    relocated = {key: part if key in _VALUES else _relocated(part, to) for key, part in schema.items()}
    match schema.get("$ref"):
        case "#":
            relocated["$ref"] = to
        case str(pointer) if pointer.startswith("#/"):
            relocated["$ref"] = to + pointer[1:]
    return relocated


def _grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema | {"x-guidance": _SPACES}), client_field="tools")


def tools_of(tools: Any, choice: Any, parallel: bool | None) -> Tools | None:
    """The tools of a request; None if the model may call none. Raises InvalidRequest."""
    functions = _functions(tools)
    if not functions:
        if choice in (None, "none", "auto"):
            return None
        raise InvalidRequest("`tool_choice` is allowed only where there are `tools`", param="tool_choice")
    # As in vLLM, a named function needs no `type`.
    kind = (choice.get("type") or "function") if isinstance(choice, dict) else choice
    several = parallel is not False
    match kind:
        case "none":
            return None
        case None | "auto":
            return Tools(functions, parallel=several)
        case "required":
            return Tools(functions, required=True, parallel=several)
        case "function":
            described = choice.get("function", choice)
            name = described.get("name") if isinstance(described, dict) else None
            if name not in [function["name"] for function in functions]:
                raise InvalidRequest(f"`tool_choice` names {name}, which is none of the `tools`", param="tool_choice")
            return Tools(functions, named=name, parallel=several)
    raise InvalidRequest("`tool_choice` must be none, auto, required, or name a function", param="tool_choice")


def _functions(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"`tools` must be a list of at most {MAX_TOOLS}", param="tools")
    functions: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        param = f"tools.{index}"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise InvalidRequest(f"{param}.type must be function", param=param)
        function = tool.get("function", {key: value for key, value in tool.items() if key != "type"})
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(f"{param}.function.name is missing", param=param)
        if not isinstance(function.get("parameters") or {}, dict):
            raise InvalidRequest(f"{param}.function.parameters must be a JSON schema", param=param)
        functions.append(function)
    if len({function["name"] for function in functions}) < len(functions):
        raise InvalidRequest("two `tools` have the same name", param="tools")
    return functions


def describe_tools(messages: Sequence[dict[str, Any]], tools: Tools | None) -> list[dict[str, Any]]:
    """Messages for a template without tools: the first message describes them, and calls are text."""
    plain = [_with_calls_as_text(message) for message in messages]
    if tools is None or tools.forced:
        return plain
    text = _INTRODUCTION.format(tools="\n".join(map(json.dumps, tools.functions)))
    if plain[0]["role"] == "system":
        return [plain[0] | {"content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    texts = [
        f"<tool_call>{json.dumps({'name': call['name'], 'arguments': call['arguments']})}</tool_call>" for call in calls
    ]
    return message | {"content": "\n".join(part for part in (message["content"], *texts) if part)} if texts else message
