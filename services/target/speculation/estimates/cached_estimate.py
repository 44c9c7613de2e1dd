"""An estimate that changes slowly and takes a while to compute, so that it serves for several steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class CachedEstimate(Generic[_Value]):
    """A value that serves a number of times, as long as it is asked for under one key."""

    def __init__(self, times: int) -> None:
        self._times = times
        self.forget()

    def forget(self) -> None:
        """Compute the value anew next time."""
        self._known: tuple[Hashable, _Value] | None = None
        self._left = 0

    def get(self, key: Hashable, compute: Callable[[], _Value]) -> _Value:
        """The value, computed if it has served its times or the key is another one."""
        if self._known is None or self._known[0] != key or not self._left:
            self._known, self._left = (key, compute()), self._times
        self._left -= 1
        return self._known[1]
