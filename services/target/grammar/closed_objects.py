"""Closes the objects of JSON schemas: an object may have only the properties that its schema names.

JSON schema allows any other property if `additionalProperties` is missing, and small models then generate properties
until max_tokens. xgrammar, which vLLM and SGLang use, closes such objects, too. With an empty list of properties the
object is empty. An object stays open if its schema has no list, or `"additionalProperties": true`, or if it requires
more properties than it names. A property that is only listed as required may have any value.

Several schemas may describe one object: those in `allOf`, and those of a `$ref`, `anyOf` or `oneOf` beside
`properties`. The object may have the properties that any of them names, so these schemas, its parts, stay open
themselves. A definition that is a part in one place and describes an object alone in another has a second, closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from services.target.grammar.enforceable import enforceable
from services.target.grammar.finite_values import target_of

_ONE = ("items", "additionalItems", "additionalProperties", "contains", "unevaluatedItems")  # keywords with a schema
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")  # ... with a list of them
_DEFINITIONS = ("$defs", "definitions")
_NAMED = ("properties", "patternProperties", *_DEFINITIONS)  # ... with schemas by name
_JOINING = ("allOf", "anyOf", "oneOf")  # keywords with schemas of the same object
_DECIDING = (  # keywords that allow further properties, or say by themselves which are allowed
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "$dynamicRef", "if",
    "dependentSchemas", "dependencies",
)  # fmt: skip
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "$comment", "deprecated"))
_CLOSED = "-closed"  # end of the name of a definition's closed form


def closed(schema: Any) -> Any:
    """The schema with every object closed that may be closed. Does not change its argument.

    Raises ValueError for a schema that cannot be enforced.
    """
    closing = _Closing(schema)
    return enforceable(closing.document() if closing.find_parts() else schema)


@dataclass
class _Names:
    """The properties that the schemas of an object name. listed: one of them has a list of properties; decided: one of
    them allows others, or says by itself which are allowed"""

    names: dict[str, None] = field(default_factory=dict)
    listed: bool = False
    decided: bool = False


class _Closing:
    """Closes the objects of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._parts: set[str] = set()  # references to schemas that are parts of objects

    def find_parts(self) -> bool:
        """Find the definitions that are parts. False if another schema is one, which has no second form."""
        self._look(self._root, part=False)
        return all(self._is_definition(reference) for reference in self._parts)

    def _look(self, node: Any, *, part: bool) -> None:
        if not isinstance(node, dict):
            return
        joined = part or _joins(node)
        reference = node.get("$ref")
        if joined and isinstance(reference, str) and reference not in self._parts:
            self._parts.add(reference)
            self._look(target_of(reference, self._root), part=True)
        for name, child in _children(node):
            self._look(child, part=joined and name in _JOINING)

    def _is_definition(self, reference: str) -> bool:
        kind, _, name = reference.removeprefix("#/").partition("/")
        return kind in _DEFINITIONS and "/" not in name and target_of(reference, self._root) is not None

    def document(self) -> Any:
        """The schema closed."""
        return self._closed(self._root, part=False)

    def _closed(self, node: Any, *, part: bool) -> Any:
        if not isinstance(node, dict):
            return node
        result, joined = dict(node), part or _joins(node)
        for name in _ONE:
            if name in result:
                result[name] = self._closed(result[name], part=False)
        for name in _SEVERAL:
            if isinstance(result.get(name), list):
                inside = joined and name in _JOINING
                result[name] = [self._closed(one, part=inside) for one in result[name]]
        for name in _NAMED:
            if isinstance(result.get(name), dict):
                result[name] = {key: self._closed(one, part=False) for key, one in result[name].items()}
        if node is self._root:
            self._add_second_forms(result)
        reference = result.get("$ref")
        if not joined and isinstance(reference, str) and reference in self._parts:
            result["$ref"] = reference + _CLOSED
        return result if part else self._without_others(node, result)

    def _add_second_forms(self, root: dict[str, Any]) -> None:
        """Keep definitions that are parts in both forms."""
        for kind in _DEFINITIONS:
            for name, one in self._root.get(kind, {}).items() if isinstance(root.get(kind), dict) else ():
                if f"#/{kind}/{_escaped(name)}" in self._parts:
                    root[kind][name + _CLOSED] = root[kind][name]
                    root[kind][name] = self._closed(one, part=True)

    def _without_others(self, node: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """Close an object to the properties that it names, if it may be closed. node: as the client wrote it."""
        if not (_joins(node) or "properties" in node):
            return result
        found, least = _Names(), node.get("minProperties", 0)
        self._collect(node, found, set())
        enough = not isinstance(least, int | float) or len(found.names) >= least
        if found.decided or not found.listed or not enough:
            return result
        own = result.get("properties", {})
        properties = {name: own.get(name, {}) for name in found.names}
        shape = {"properties": properties, "additionalProperties": False}
        return shape | {name: part for name, part in result.items() if name != "properties"}  # the order is this one

    def _collect(self, node: Any, found: _Names, seen: set[str]) -> None:
        """Add the properties of a schema, in the order in which it names them. seen: references that were followed."""
        if not isinstance(node, dict):
            return
        found.decided |= any(name in node for name in _DECIDING)
        for name, value in node.items():
            if name == "properties":
                found.listed |= isinstance(value, dict)
                found.decided |= not isinstance(value, dict)
                found.names |= dict.fromkeys(value) if isinstance(value, dict) else {}
            elif name in _JOINING and isinstance(value, list):
                for part in value:
                    self._collect(part, found, seen)
            elif name == "$ref" and isinstance(value, str) and value not in seen:
                seen.add(value)
                self._collect(target_of(value, self._root), found, seen)
        names = node.get("required")
        found.names |= dict.fromkeys(name for name in names if isinstance(name, str)) if isinstance(names, list) else {}


def _joins(node: dict[str, Any]) -> bool:
    """True if several schemas describe an object here."""
    parts = node.get("allOf")
    if isinstance(parts, list):
        count = sum(isinstance(part, dict) and bool(part.keys() - _ANNOTATIONS) for part in parts)
        return count > 1 or not {"properties", "required", "$ref", "anyOf", "oneOf"}.isdisjoint(node)
    if isinstance(node.get("properties"), dict):
        return not {"$ref", "anyOf", "oneOf"}.isdisjoint(node)
    return "$ref" in node and "required" in node


def _children(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, with the keywords that they belong to."""
    for name, value in node.items():
        if name in _ONE:
            yield name, value
        elif name in _SEVERAL and isinstance(value, list):
            yield from ((name, one) for one in value)
        elif name in _NAMED and isinstance(value, dict):
            yield from ((name, one) for one in value.values())


def _escaped(name: str) -> str:
    """A name in a reference."""
    return name.replace("~", "~0").replace("/", "~1")
