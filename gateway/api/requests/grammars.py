"""Grammars of answers, from the request fields of OpenAI, SGLang and vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from outrider.errors import InvalidRequest
from outrider.serving.messages import Grammar, GrammarKind

FIELDS = (
    "response_format", "json_schema", "regex", "ebnf", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip

_COMPACT = "disable_any_whitespace"  # in structured_outputs


def grammar_of(fields: Mapping[str, Any]) -> Grammar | None:
    """The grammar of a request. Raises InvalidRequest for an invalid one, or for more than one."""
    found: list[tuple[str, Grammar]] = []
    for name in FIELDS:
        value = fields.get(name)
        try:
            grammar = None if value is None else _READERS[name](value, name)
        except InvalidRequest as error:
            error.param = error.param if (error.param or "").startswith(name) else name
            raise
        if grammar is not None:
            found.append((name, replace(grammar, client_field=name)))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequest(f"{names} cannot be combined; send one of them", param=found[1][0])
    if not found:
        return None
    options = fields.get("structured_outputs")
    compact = isinstance(options, dict) and options.get(_COMPACT) is True
    return _compact(found[0][1], found[0][0]) if compact else found[0][1]


def _compact(grammar: Grammar, name: str) -> Grammar:
    """A JSON schema whose texts have no whitespace between tokens, by an option of the grammar compiler.

    name: of the request's field. Raises InvalidRequest.
    """
    schema = json.loads(grammar.text) if grammar.kind is GrammarKind.JSON_SCHEMA else False
    if schema is False:
        return grammar
    options = {} if schema is True else schema
    given = options.get("x-guidance") or {}
    if not isinstance(given, dict):
        raise InvalidRequest(f"`x-guidance` of the schema must be an object, not {json.dumps(given)[:50]}", param=name)
    guidance = {**given, "whitespace_flexible": False}
    return replace(grammar, text=json.dumps({**options, "x-guidance": guidance}))


def _json_schema(value: Any, name: str) -> Grammar:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema)
    except ValueError as error:
        raise InvalidRequest(f"{name} is no valid JSON: {error}", param=name) from None
    except RecursionError:
        raise InvalidRequest(f"{name} is nested too deep", param=name) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{name} must be a JSON schema", param=name)
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def _json_object(name: str) -> Grammar:
    return _json_schema({"type": "object"}, name)


def _regex(value: Any, name: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, _text(value, name))


def _ebnf(value: Any, name: str) -> Grammar:
    return Grammar(GrammarKind.EBNF, _text(value, name))


def _choice(value: Any, name: str) -> Grammar:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InvalidRequest(f"{name}: the choices must be a list of texts", param=name)
    if not value:
        raise InvalidRequest(f"{name}: the list of choices is empty; name at least one, or leave it out", param=name)
    if "" in value:
        raise InvalidRequest(f"{name}: choice {value.index('')} is an empty text; remove it", param=name)
    return Grammar(GrammarKind.EBNF, "start: " + " | ".join(json.dumps(text) for text in value))


def _response_format(value: Any, name: str) -> Grammar | None:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":  # clients of llama.cpp and others add a schema
            schema = value.get("schema")
            return _json_object(name) if schema is None else _json_schema(schema, f"{name}.schema")
        case "json_schema":
            described = value.get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            if schema is None:
                raise InvalidRequest(f"{name}.json_schema.schema is missing", param=name)
            return _json_schema(schema, name)
    raise InvalidRequest(f"{name}.type must be text, json_object or json_schema, not {kind}", param=name)


def _structured_outputs(value: Any, name: str) -> Grammar | None:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", param=name)
    found: list[Grammar] = []
    for key, content in value.items():
        if content is None or content is False or (key == _COMPACT and content is True):
            continue
        if key not in _STRUCTURED:
            raise InvalidRequest(f"`{name}.{key}` is not supported by this server; leave it out", param=name)
        found.append(_STRUCTURED[key](content, name))
    if len(found) > 1:
        raise InvalidRequest(f"{name} must have one of {', '.join(_STRUCTURED)}", param=name)
    return found[0] if found else None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a text", param=name)
    if not value:
        raise InvalidRequest(f"{name} is empty; send a pattern or a grammar, or leave it out", param=name)
    return value


_Reader = Callable[[Any, str], Grammar | None]
_STRUCTURED: dict[str, Callable[[Any, str], Grammar]] = {
    "json": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "json_object": lambda _, name: _json_object(name),
}
_READERS: dict[str, _Reader] = {
    "response_format": _response_format,
    "json_schema": _json_schema,
    "regex": _regex,
    "ebnf": _ebnf,
    "structured_outputs": _structured_outputs,
    "guided_json": _json_schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
}
