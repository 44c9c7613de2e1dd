"""JSON schemas that only a few values satisfy, and lists of such values in which none is repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from math import comb, perm
from typing import Any

MAX_VALUES = 128
"""Values of a schema that are listed."""

MAX_LISTS = 384
"""Lists of values that are listed. llguidance takes half a second for this many, and two for twice as many."""

_DEEPEST = 32  # references and alternatives in one another
_FEW: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}  # values of types that have few


def values_of(schema: Any, root: Any, depth: int = 0) -> list[Any] | None:
    """Different values, among which are all that satisfy a schema; None if there may be more than MAX_VALUES.

    root: the whole schema, for its references
    """
    found = _values(schema, root, depth) if isinstance(schema, dict) and depth < _DEEPEST else None
    if found is None:
        return None
    different = list({_identity(value): value for value in found}.values())
    return different if len(different) <= MAX_VALUES else None


def _values(schema: dict[str, Any], root: Any, depth: int) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if isinstance(types, list) and types and all(isinstance(one, str) and one in _FEW for one in types):
        return [value for one in types for value in _FEW[one]]
    if types == ["integer"]:
        return _integers(schema)
    if isinstance(reference := schema.get("$ref"), str):
        return values_of(target_of(reference, root), root, depth + 1)
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list):
            every = [values_of(part, root, depth + 1) for part in parts]
            return None if None in every else [value for some in every for value in some or ()]
    parts = schema.get("allOf")
    every = [values_of(part, root, depth + 1) for part in parts] if isinstance(parts, list) else []
    return next((some for some in every if some is not None), None)


def _integers(schema: dict[str, Any]) -> list[Any] | None:
    """The numbers between two limits."""
    lowest, highest = schema.get("minimum"), schema.get("maximum")
    if type(lowest) is not int or type(highest) is not int or highest - lowest >= MAX_VALUES:
        return None
    return list(range(lowest, highest + 1))


def _identity(value: Any) -> str:
    """Equal for values that are equal in JSON schema, where 1 is 1.0 and not true."""
    if isinstance(value, list):
        return f"[{','.join(map(_identity, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(name)}:{_identity(value[name])}' for name in sorted(value))}}}"
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def target_of(reference: str, root: Any) -> Any:
    """What a reference within a schema leads to; None for another one."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found


def lists_without_repetition(values: Sequence[Any], least: int, most: int) -> list[list[Any]] | None:
    """All lists of between `least` and `most` different values; if those are too many, those in the given order.

    None if those are too many, too
    """
    sizes = range(least, min(most, len(values)) + 1)

    def listed(lists: Iterator[tuple[Any, ...]]) -> list[list[Any]]:
        return [list(one) for one in lists]

    if sum(perm(len(values), size) for size in sizes) <= MAX_LISTS:
        return listed(one for size in sizes for one in permutations(values, size))
    if sum(comb(len(values), size) for size in sizes) <= MAX_LISTS:
        return listed(one for size in sizes for one in combinations(values, size))
    return None
