"""Numbers in JSON schemas that llguidance cannot hold.

It takes the absolute value of -2^63 while it compiles an `enum` or a `const`, which overflows, and recurses until the
stack ends: a crash of the whole process. Numbers near it become the same one, as it reads them as doubles.
"""

from __future__ import annotations

from typing import Any

_LOWEST = -(2.0**63)
_LARGEST = 10**300  # an integer beyond a double cannot be compared with one


def checked(schema: Any) -> Any:
    """The schema itself. Raises ValueError for a number that llguidance cannot hold."""
    if isinstance(schema, dict):
        for value in schema.values():
            checked(value)
    elif isinstance(schema, list):
        for value in schema:
            checked(value)
    elif type(schema) is int and (abs(schema) > _LARGEST or float(schema) == _LOWEST):
        raise ValueError(f"the number {schema!r:.40} is beyond those that grammars can hold; leave it out")
    return schema
