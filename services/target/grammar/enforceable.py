"""Rewrites keywords of JSON schemas that llguidance does not enforce as they are, and refuses what cannot be enforced.

minProperties, maxProperties
    of an object whose properties are all named: alternatives, each of which requires some of them and excludes others.
    Where names are free, llguidance counts a repeated name again, so that at most one property may be free there
uniqueItems
    nothing to enforce if it is false, or if at most one item is allowed
"""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

_ONE = ("items", "additionalItems", "additionalProperties", "contains", "unevaluatedItems")  # keywords with a schema
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")  # ... with a list of them
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # ... with schemas by name
_UNKNOWN = (  # to llguidance
    "uniqueItems", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "not", "contains",
    "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties", "if", "then", "else", "$dynamicRef",
    "$recursiveRef",
)  # fmt: skip
_TOGETHER = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")  # with which properties are not all named here
_MAX_ALTERNATIVES = 128


def enforceable(schema: Any) -> Any:
    """The schema rewritten. Does not change its argument. Raises ValueError for a keyword that cannot be enforced."""
    guidance = schema.get("x-guidance") if isinstance(schema, dict) else None
    lenient = isinstance(guidance, dict) and guidance.get("lenient") is True  # llguidance ignores what it cannot do
    return _rewritten(schema, "", lenient=lenient)


def _rewritten(node: Any, path: str, *, lenient: bool) -> Any:
    if not isinstance(node, dict):
        return node
    result = dict(node)

    def inside(part: Any, *names: str) -> Any:
        return _rewritten(part, ".".join((path, *names) if path else names), lenient=lenient)

    for name in _ONE:
        if name in result:
            result[name] = inside(result[name], name)
    for name in _SEVERAL:
        if isinstance(result.get(name), list):
            result[name] = [inside(one, name, str(i)) for i, one in enumerate(result[name])]
    for name in _NAMED:
        if isinstance(result.get(name), dict):
            result[name] = {key: inside(one, name, key) for key, one in result[name].items()}
    if "uniqueItems" in result and (result["uniqueItems"] is False or result.get("maxItems") in (0, 1)):
        del result["uniqueItems"]
    unknown = [name for name in _UNKNOWN if name in result]
    if unknown and not lenient:
        raise _unenforceable(path, unknown[0], "")
    return _counted(result, path, lenient=lenient)


def _unenforceable(path: str, name: str, where: str) -> ValueError:
    field = f"{path}.{name}" if path else name
    return ValueError(f"`{field}` cannot be enforced by this server{where}; leave it out, and check the answer for it")


def _counted(node: dict[str, Any], path: str, *, lenient: bool) -> dict[str, Any]:
    """An object with the number of its properties enforced."""
    properties, names = node.get("properties", {}), node.get("required", [])
    least, most = node.get("minProperties", 0), node.get("maxProperties")
    if (most is None and not least) or {"const", "enum"} & node.keys():
        return node
    valid = type(least) is int and (most is None or type(most) is int)
    if not valid or not isinstance(properties, dict) or not isinstance(names, list):
        return node  # llguidance says what is wrong
    required = {name for name in names if isinstance(name, str)}
    optional = [name for name in properties if name not in required]
    named = node.get("additionalProperties") is False and not any(name in node for name in _TOGETHER)
    if named and required <= properties.keys() and optional and (most is None or len(required) <= most):
        return _alternatives(
            node, path, optional, least - len(required), None if most is None else most - len(required)
        )
    if least - len(required) > 1 and not lenient:
        raise _unenforceable(path, "minProperties", f" above {len(required) + 1} where properties may have any name")
    return node


def _alternatives(node: dict[str, Any], path: str, optional: list[str], least: int, most: int | None) -> dict[str, Any]:
    """An object of which between `least` and `most` of the optional properties are present."""
    count = len(optional)
    least, most = max(least, 0), count if most is None else min(most, count)
    if comb(count, most) * comb(most, min(least, most)) > _MAX_ALTERNATIVES:
        raise _unenforceable(path, "minProperties" if least else "maxProperties", f" with {count} optional properties")
    rest = {name: part for name, part in node.items() if name not in ("minProperties", "maxProperties")}
    alternatives: list[dict[str, Any]] = [
        {"properties": {name: False for name in optional if name not in allowed}, "required": list(present)}
        for allowed in combinations(optional, most)
        for present in combinations(allowed, least)
    ]
    return rest if alternatives == [{"properties": {}, "required": []}] else rest | {"anyOf": alternatives}
