"""Formats of strings in schemas of answers: those that nobody here knows are left out.

JSON schema has them as words on a string, which bind only where they are understood, and much writes its own: Pydantic
says `password`, `binary` and `file-path`, OpenAPI `byte`. llguidance refuses the whole schema for one of them.
"""

from __future__ import annotations

from typing import Any

KNOWN = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""What llguidance writes a grammar for."""
_LITERAL = ("const", "enum", "default", "example", "examples")  # keywords with values, not schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # ... with schemas by name


def understood(schema: Any) -> Any:
    """The schema without formats that are not known; what is passed in stays as it is."""
    if isinstance(schema, list):
        return [understood(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    told = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in KNOWN:
            continue
        if key in _NAMED and isinstance(value, dict):
            told[key] = {name: understood(one) for name, one in value.items()}
        else:
            told[key] = value if key in _LITERAL else understood(value)
    return told
