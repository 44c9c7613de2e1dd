"""The sender of a request: its name, the caches that it shares, and whether it may control the targets."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from typing import NamedTuple


class Caller(NamedTuple):
    """A sender of requests.

    name: of the owner of request ids and limits, one a key; empty without API keys
    caches: callers with equal values share cached prefixes and stored n-grams
    admin: may control the targets, and end requests of others
    """

    name: str = ""
    caches: str = ""
    admin: bool = False

    @property
    def owner(self) -> str | None:
        """The callers whose requests it may end: those of this name; None for all."""
        return None if self.admin else self.name


ANYBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
"""Of the request that the present task answers."""


def fingerprint(key: bytes) -> str:
    """A name of a key that does not reveal it: the same in all gateways, because they may share targets."""
    return hashlib.blake2b(key, digest_size=16, person=b"outrider caller").hexdigest()
