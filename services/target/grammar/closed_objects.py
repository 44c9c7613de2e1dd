"""Schemas of answers, closed: an object has the properties that its schema names, and no others.

JSON schema allows any others where `additionalProperties` is missing, and small models then go on with them until their
tokens are spent. xgrammar, which vLLM and SGLang compile schemas with, takes a missing word for "none" too. An object
stays open whose schema says `"additionalProperties": true` or asks for more properties than it names, and one that
several schemas describe together. What is only named as required may be anything.
"""

from __future__ import annotations

from typing import Any

_ONE = ("items", "additionalItems", "additionalProperties", "contains", "unevaluatedItems")  # keywords with a schema
_SEVERAL = ("anyOf", "oneOf", "prefixItems")  # ... with a list of them
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # ... with schemas by name
_TOGETHER = (  # keywords by which others have a say in the same object
    "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies",
    "unevaluatedProperties", "patternProperties",
)  # fmt: skip


def closed(schema: Any) -> Any:
    """The schema with every object closed that may be; what is passed in stays as it is."""
    return schema if _inherits(schema) else _closed(schema)


def _inherits(node: Any) -> bool:
    """True if some object may have properties of schemas that do not name one another's."""
    if isinstance(node, list):
        return any(map(_inherits, node))
    if not isinstance(node, dict):
        return False
    extends = isinstance(node.get("$ref"), str) and isinstance(node.get("properties"), dict)
    return isinstance(node.get("allOf"), list) or extends or any(map(_inherits, node.values()))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    told = dict(schema)
    for name in _ONE:
        if name in told:
            told[name] = _closed(told[name])
    for name in _SEVERAL:
        # Alternatives add to what stands beside them: then none knows all properties.
        if isinstance(told.get(name), list) and "properties" not in told:
            told[name] = [_closed(one) for one in told[name]]
    for name in _NAMED:
        if isinstance(told.get(name), dict):
            told[name] = {key: _closed(one) for key, one in told[name].items()}
    alone = not any(name in told for name in _TOGETHER)
    properties, least = told.get("properties"), told.get("minProperties", 0)
    if alone and properties and isinstance(properties, dict) and "additionalProperties" not in told:
        further: dict[str, Any] = {name: {} for name in _required(told) if name not in properties}
        if not isinstance(least, int | float) or len(properties) + len(further) >= least:
            told |= {"properties": properties | further, "additionalProperties": False}
    return told


def _required(schema: dict[str, Any]) -> list[str]:
    """Names of the properties that an object must have."""
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
