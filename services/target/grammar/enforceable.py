"""Rewrites keywords of JSON schemas that llguidance does not enforce as they are, and refuses what cannot be enforced.

minProperties, maxProperties
    of an object whose properties are all named: alternatives, each of which requires some of them and excludes others.
    Where names are free, llguidance counts a repeated name again, so at most one of the properties that the minimum
    counts may have a free name
propertyNames
    with finitely many names: they are named. With a pattern alone: it becomes that of all names
uniqueItems
    of finitely many values: the lists of them without repetition, if those are few, otherwise those in the order of the
    values. Nothing to enforce if it is false, or if at most one item is allowed
"""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

from services.target.grammar.finite_values import lists_without_repetition, values_of

_ONE = ("items", "additionalItems", "additionalProperties", "contains", "unevaluatedItems")  # keywords with a schema
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")  # ... with a list of them
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # ... with schemas by name
_UNKNOWN = (  # to llguidance
    "uniqueItems", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "not", "contains",
    "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties", "if", "then", "else", "$dynamicRef",
    "$recursiveRef",
)  # fmt: skip
_TOGETHER = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")  # with which properties are not all named here
_ANNOTATIONS = ("title", "description", "default", "examples", "$comment")
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MAX_ALTERNATIVES = 128


def enforceable(schema: Any) -> Any:
    """The schema rewritten. Does not change its argument. Raises ValueError for a keyword that cannot be enforced."""
    guidance = schema.get("x-guidance") if isinstance(schema, dict) else None
    lenient = isinstance(guidance, dict) and guidance.get("lenient") is True  # llguidance ignores what it cannot do
    return _Rewriting(schema, lenient=lenient).of(schema, "")


class _Rewriting:
    """Rewrites the parts of one schema. Paths name their places, for errors."""

    def __init__(self, root: Any, *, lenient: bool) -> None:
        self._root = root
        self._lenient = lenient

    def of(self, node: Any, path: str) -> Any:
        """A part of the schema."""
        if not isinstance(node, dict):
            return node
        result = self._inside(node, path)
        if "uniqueItems" in result:
            result = self._unique(result, path)
        if "propertyNames" in result:
            result = self._named(result)
        unknown = [name for name in _UNKNOWN if name in result]
        if unknown and not self._lenient:
            raise _unenforceable(path, unknown[0], "")
        return self._counted(result, path)

    def _inside(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        """A copy of a part, whose own parts are rewritten."""
        result = dict(node)

        def inside(part: Any, *names: str) -> Any:
            return self.of(part, ".".join((path, *names) if path else names))

        for name in _ONE:
            if name in result:
                result[name] = inside(result[name], name)
        for name in _SEVERAL:
            if isinstance(result.get(name), list):
                result[name] = [inside(one, name, str(i)) for i, one in enumerate(result[name])]
        for name in _NAMED:
            if isinstance(result.get(name), dict):
                result[name] = {key: inside(one, name, key) for key, one in result[name].items()}
        return result

    # --- arrays ---

    def _unique(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        """An array whose items differ, unless that cannot be enforced."""
        rest = {name: part for name, part in node.items() if name != "uniqueItems"}
        least, most = node.get("minItems", 0), node.get("maxItems")
        if node["uniqueItems"] is False or most in (0, 1):
            return rest
        values = values_of(node.get("items"), self._root)
        valid = type(least) is int and least >= 0 and (most is None or type(most) is int)
        if values is None or not valid or "prefixItems" in node or isinstance(node.get("items"), list):
            return node
        lists = lists_without_repetition(values, least, len(values) if most is None else most)
        if lists is None:
            if self._lenient:
                return node
            raise _unenforceable(path, "uniqueItems", f" with {len(values)} values; a lower `maxItems` may help")
        return _either(rest, [{"enum": lists}], "array")

    # --- objects ---

    def _named(self, node: dict[str, Any]) -> dict[str, Any]:
        """An object whose names are listed, or match a pattern, unless that cannot be enforced."""
        names, further = node["propertyNames"], node.get("additionalProperties", {})
        rest = {name: part for name, part in node.items() if name != "propertyNames"}
        if names is True or (isinstance(names, dict) and not names.keys() - {"type", *_ANNOTATIONS}):
            return rest if names is True or names.get("type", "string") == "string" else node
        properties = node.get("properties", {})
        if not isinstance(properties, dict) or any(name in node for name in _TOGETHER):
            return node
        if (values := values_of(names, self._root)) is not None:
            allowed = {name for name in values if isinstance(name, str)}
            listed = {name: part if name in allowed else False for name, part in properties.items()}
            listed |= {name: further for name in values if name in allowed and name not in listed}
            return rest | {"properties": listed, "additionalProperties": False}
        only_pattern = isinstance(names, dict) and not names.keys() - {"type", "pattern", *_ANNOTATIONS}
        if only_pattern and not properties and isinstance(names.get("pattern"), str):
            return rest | {"patternProperties": {names["pattern"]: further}, "additionalProperties": False}
        return node

    def _counted(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        """An object with the number of its properties enforced."""
        properties, names = node.get("properties", {}), node.get("required", [])
        least, most = node.get("minProperties", 0), node.get("maxProperties")
        if (most is None and not least) or {"const", "enum"} & node.keys():
            return node
        valid = type(least) is int and (most is None or type(most) is int)
        if not valid or not isinstance(properties, dict) or not isinstance(names, list):
            return node  # llguidance reports what is wrong
        required = {name for name in names if isinstance(name, str)}
        optional = [name for name, part in properties.items() if name not in required and part is not False]
        alone = not {"$ref", "allOf", "anyOf", "oneOf"} & node.keys()
        named = alone and node.get("additionalProperties") is False and "patternProperties" not in node
        lacking = least - len(required)
        if named and required <= properties.keys() and optional and (most is None or len(required) <= most):
            return _alternatives(node, path, optional, lacking, None if most is None else most - len(required))
        if lacking <= 1 or self._lenient:
            return node
        if alone and most is None and lacking <= len(optional) + 1:
            return _with_a_free_name(node, path, optional, lacking)
        above = len(required) + (len(optional) if alone and most is None else 0) + 1
        raise _unenforceable(path, "minProperties", f" above {above} where properties may have any name")


def _unenforceable(path: str, name: str, where: str) -> ValueError:
    field = f"{path}.{name}" if path else name
    return ValueError(f"`{field}` cannot be enforced by this server{where}; leave it out, and check the answer for it")


def _either(node: dict[str, Any], alternatives: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The node with one of some alternatives for values of a type, and none for values of other types."""
    types = node.get("type", list(_TYPES))
    types = [types] if isinstance(types, str) else types
    others = [one for one in types if one != kind] if isinstance(types, list) else []
    if others:
        alternatives = [*({"type": kind} | one for one in alternatives), {"type": others}]
    if "anyOf" not in node:
        return node | {"anyOf": alternatives}
    both = node.get("allOf")
    return node | {"allOf": [*(both if isinstance(both, list) else ()), {"anyOf": alternatives}]}


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


def _with_a_free_name(node: dict[str, Any], path: str, optional: list[str], lacking: int) -> dict[str, Any]:
    """An object with at least `lacking` further properties: named ones, or one of them with a free name."""
    count = len(optional)
    if comb(count, lacking) + comb(count, lacking - 1) > _MAX_ALTERNATIVES:
        raise _unenforceable(path, "minProperties", f" with {count} optional properties")
    least = node["minProperties"]
    rest = {name: part for name, part in node.items() if name != "minProperties"}
    named: list[dict[str, Any]] = [{"required": list(present)} for present in combinations(optional, lacking)]
    free: list[dict[str, Any]] = [
        {
            "properties": {name: False for name in optional if name not in present},
            "required": list(present),
            "minProperties": least,
        }
        for present in combinations(optional, lacking - 1)
    ]
    return rest | {"anyOf": [*named, *free]}
