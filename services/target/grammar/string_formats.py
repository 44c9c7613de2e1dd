"""Removes string formats that llguidance does not know from JSON schemas.

JSON schema treats `format` as an annotation that implementations may ignore, and many generators write their own:
Pydantic `password`, `binary` and `file-path`, OpenAPI `byte`. llguidance rejects a whole schema for one unknown format.
"""

from __future__ import annotations

from typing import Any

KNOWN = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""The formats that llguidance supports."""
_LITERAL = ("const", "enum", "default", "example", "examples")  # keywords with values, not schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # ... with schemas by name


def understood(schema: Any) -> Any:
    """The schema without unknown formats. Does not change its argument."""
    if isinstance(schema, list):
        return [understood(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in KNOWN:
            continue
        if key in _NAMED and isinstance(value, dict):
            result[key] = {name: understood(one) for name, one in value.items()}
        else:
            result[key] = value if key in _LITERAL else understood(value)
    return result
