"""Types of body fields: strict, because a number in quotes is a mistake, and bounded in size."""

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
# Validation stops at the first wrong entry: reporting a million of them would block the event loop for half a minute.
Items = Annotated[list[Item], Field(fail_fast=True)]


def few(limit: int) -> BeforeValidator:
    """Refuses an object with more entries before each is validated, for the same reason."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_many", f"at most {limit} entries are allowed")
        return value

    return BeforeValidator(check)


def _bounded(value: Any) -> Any:
    """Refuses a conversation with too many messages, parts and calls before each is validated."""
    if isinstance(value, list):
        parts = (message.get(name) for message in value if isinstance(message, dict) for name in _PIECES)
        if len(value) + sum(len(part) for part in parts if isinstance(part, list)) > MAX_PIECES:
            raise PydanticCustomError("too_many", f"at most {MAX_PIECES} messages, parts and calls are allowed")
    return value


_PIECES = ("content", "tool_calls")
BOUNDED = BeforeValidator(_bounded)

Biases = Annotated[dict[str, Number], few(MAX_BIASED_TOKENS)]
