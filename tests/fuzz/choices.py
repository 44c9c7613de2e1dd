"""Bytes as decisions: what a fuzzer mutates becomes fields, numbers and texts of a structured input.

Every sequence of bytes is a valid one; where it ends, all further decisions are the first ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

One = TypeVar("One")
_INTEGERS = (
    0, 1, -1, 2, 3, 7, 16, 64, 128, 255, 2**16, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63, -(2**63), 2**64,
    10**30,
)  # fmt: skip
_NUMBERS = (0.0, 1.0, -1.0, 0.5, 1e-9, 1e9, 1.5, -0.0, 1e308, 1e-320)
_TEXTS = (
    "", "a", "Zürich", "日本 🚀", "\n", "\0", "</think>", "<tool_call>", "<|end|>", '{"a": 1}', "[", "\\ud83d",
    "x" * 300,
)  # fmt: skip


class Choices:
    """Takes decisions from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    @property
    def left(self) -> int:
        """Bytes that are left."""
        return len(self._data) - self._place

    def byte(self) -> int:
        """A number below 256."""
        if not self.left:
            return 0
        self._place += 1
        return self._data[self._place - 1]

    def below(self, count: int) -> int:
        """A number below `count`, which is at most 65536."""
        return (self.byte() if count <= 256 else self.byte() << 8 | self.byte()) % count

    def chance(self, of: int) -> bool:
        """True once in `of`."""
        return self.below(of) == of - 1

    def one(self, options: Sequence[One]) -> One:
        """One of the options."""
        return options[self.below(len(options))]

    def take(self, count: int) -> bytes:
        """Up to a number of bytes, unchanged."""
        self._place += (taken := len(part := self._data[self._place : self._place + count]))
        assert taken <= count
        return part

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(self.left)

    def integer(self) -> int:
        """A number, often one at the edge of a type."""
        return self.one(_INTEGERS) if self.chance(2) else self.byte()

    def number(self) -> float:
        """A floating-point number, always finite."""
        return self.one(_NUMBERS) if self.chance(2) else self.byte() / 64

    def text(self) -> str:
        """A text, often one that some parser takes for its own."""
        if self.chance(2):
            return self.one(_TEXTS)
        return self.take(self.below(24)).decode("utf-8", "replace")

    def items(self, make: Callable[[], One], most: int = 4) -> list[One]:
        """A short list."""
        return [make() for _ in range(self.below(most + 1))]

    def value(self, depth: int = 3) -> Any:
        """Any value of JSON."""
        kinds: list[Callable[[], Any]] = [
            lambda: None, lambda: True, lambda: False, self.integer, self.number, self.text,
        ]  # fmt: skip
        if depth:
            kinds += [
                lambda: self.items(lambda: self.value(depth - 1)),
                lambda: {self.text(): self.value(depth - 1) for _ in range(self.below(4))},
            ]
        return self.one(kinds)()

    def schema(self, depth: int = 4) -> Any:
        """Something like a JSON schema."""
        if not depth or self.chance(12):
            return self.one((True, False, {}, {"type": "string"}, {"$ref": "#"}, {"$ref": "#/$defs/a"}))
        schema: dict[str, Any] = {}
        for _ in range(1 + self.below(4)):
            name = self.one(tuple(_KEYWORDS))
            schema[name] = _KEYWORDS[name](self, depth - 1) if not self.chance(16) else self.value(2)
        return schema


def _schemas(choices: Choices, depth: int) -> Any:
    return choices.items(lambda: choices.schema(depth), 3)


def _named(choices: Choices, depth: int) -> Any:
    return {choices.one(("a", "b", "", "é", "a.b")): choices.schema(depth) for _ in range(choices.below(4))}


def _schema(choices: Choices, depth: int) -> Any:
    return choices.schema(depth)


def _types(choices: Choices, depth: int) -> Any:
    name = choices.one(("object", "array", "string", "integer", "number", "boolean", "null", "any"))
    return [name, "null"] if choices.chance(5) else name


def _count(choices: Choices, depth: int) -> Any:
    return choices.integer()


_KEYWORDS: dict[str, Callable[[Choices, int], Any]] = {
    "type": _types, "properties": _named, "required": lambda c, _: c.items(lambda: c.one(("a", "b", "c", "")), 3),
    "additionalProperties": _schema, "items": _schema, "prefixItems": _schemas, "anyOf": _schemas, "oneOf": _schemas,
    "allOf": _schemas, "not": _schema, "enum": lambda c, _: c.items(lambda: c.value(1)),
    "const": lambda c, _: c.value(1),
    "pattern": lambda c, _: c.one(("^a+$", "[", "(a|b)*", "a{1000}", "(?=a)", c.text())),
    "format": lambda c, _: c.one(("date", "uuid", "email", "none", "")), "minLength": _count, "maxLength": _count,
    "minimum": _count, "maximum": _count, "exclusiveMinimum": _count, "multipleOf": lambda c, _: c.number(),
    "minItems": _count, "maxItems": _count, "minProperties": _count, "maxProperties": _count,
    "uniqueItems": lambda c, _: True, "$ref": lambda c, _: c.one(("#", "#/$defs/a", "#/properties/a", "http://x/", "")),
    "$defs": _named, "patternProperties": _named, "propertyNames": _schema, "contains": _schema,
    "x-guidance": lambda c, _: c.one(({}, {"whitespace_flexible": False}, {"item_separator": ","}, 5, None)),
    "if": _schema, "then": _schema, "default": lambda c, _: c.value(1), "description": lambda c, _: c.text(),
}  # fmt: skip


def as_json(value: Any) -> bytes:
    """A value as UTF-8, with lone surrogates escaped."""
    return json.dumps(value).encode()
