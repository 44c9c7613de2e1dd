"""Types of fields in bodies: strict, for a number in quotes is a mistake; and bounds of what must be looked at."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from gateway.text.encoding import MAX_PIECES
from outrider.speculation.sampling import MAX_BIASED_TOKENS

Count = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Item = TypeVar("Item")
# The first wrong entry is told of, and no other is looked for: telling of a million of them takes half a minute, in
# which nobody else is answered.
Items = Annotated[list[Item], Field(fail_fast=True)]


def few(most: int) -> BeforeValidator:
    """Refuses an object of more entries before it looks at each, for the same reason."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_many", f"at most {most} entries are allowed")
        return value

    return BeforeValidator(check)


def _bounded(value: Any) -> Any:
    """Refuses a conversation of more pieces, messages and what they consist of, before it looks at each."""
    if isinstance(value, list):
        parts = (message.get(name) for message in value if isinstance(message, dict) for name in _PIECES)
        if len(value) + sum(len(part) for part in parts if isinstance(part, list)) > MAX_PIECES:
            raise PydanticCustomError("too_many", f"at most {MAX_PIECES} messages, parts and calls are allowed")
    return value


_PIECES = ("content", "tool_calls")
BOUNDED = BeforeValidator(_bounded)

Biases = Annotated[dict[str, Number], few(MAX_BIASED_TOKENS)]
