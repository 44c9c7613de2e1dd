"""Closes the objects of JSON schemas: an object may have only the properties that its schema names.

JSON schema allows any other property if `additionalProperties` is missing, and small models then generate properties
until max_tokens. xgrammar, which vLLM and SGLang use, closes such objects, too. With an empty list of properties the
object is empty. An object stays open if its schema has no list, or `"additionalProperties": true`, if it requires more
properties than it names, or if several schemas describe it. A property that is only listed as required may have any
value.
"""

from __future__ import annotations

from typing import Any

from services.target.grammar.enforceable import enforceable

_ONE = ("items", "additionalItems", "additionalProperties", "contains", "unevaluatedItems")  # keywords with a schema
_SEVERAL = ("anyOf", "oneOf", "prefixItems")  # ... with a list of them
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # ... with schemas by name
_TOGETHER = (  # keywords by which other schemas constrain the same object
    "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies",
    "unevaluatedProperties", "patternProperties",
)  # fmt: skip


def closed(schema: Any) -> Any:
    """The schema with every object closed that may be closed. Does not change its argument.

    Raises ValueError for a schema that cannot be enforced.
    """
    return enforceable(schema if _inherits(schema) else _closed(schema))


def _inherits(node: Any) -> bool:
    """True if several schemas may contribute properties to one object."""
    if isinstance(node, list):
        return any(map(_inherits, node))
    if not isinstance(node, dict):
        return False
    extends = isinstance(node.get("$ref"), str) and isinstance(node.get("properties"), dict)
    return isinstance(node.get("allOf"), list) or extends or any(map(_inherits, node.values()))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name in _ONE:
        if name in result:
            result[name] = _closed(result[name])
    for name in _SEVERAL:
        # Alternatives extend the properties next to them, so no single one names all properties.
        if isinstance(result.get(name), list) and "properties" not in result:
            result[name] = [_closed(one) for one in result[name]]
    for name in _NAMED:
        if isinstance(result.get(name), dict):
            result[name] = {key: _closed(one) for key, one in result[name].items()}
    alone = not any(name in result for name in _TOGETHER)
    properties, least = result.get("properties"), result.get("minProperties", 0)
    if alone and isinstance(properties, dict) and "additionalProperties" not in result:
        further: dict[str, Any] = {name: {} for name in _required(result) if name not in properties}
        if not isinstance(least, int | float) or len(properties) + len(further) >= least:
            result |= {"properties": properties | further, "additionalProperties": False}
    return result


def _required(schema: dict[str, Any]) -> list[str]:
    """Names of the required properties."""
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
