"""Who is let in: callers with a key, and requests while there is room and the gateway stays.

What waits for a place in a target waits there, in order of priority; here only its number is bounded.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.admission.retry_after import Pace
from outrider.config import GatewayConfig
from outrider.errors import InvalidRequest, Overloaded, TooManyRequests, Unauthenticated, Unavailable

KEYS_VARIABLE = "OUTRIDER_API_KEY"
_POLL_SECONDS = 0.02


class Admission:
    """Counts generations under way, and refuses those that are too many or too late."""

    def __init__(self, most: int | None = None) -> None:
        """most: generations under way; None is without limit."""
        self.draining = False
        self.running = 0
        self._most = most
        self._pace = Pace()

    def check(self, count: int) -> None:
        """Raise InvalidRequest for more generations at once than may ever be under way."""
        if self._most is not None and count > self._most:
            raise InvalidRequest(f"this asks for {count} answers; at most {self._most} may be under way; ask for fewer")

    def enter(self) -> None:
        """Count a generation. Raises Overloaded, Unavailable."""
        if self.draining:
            raise Unavailable("the gateway is shutting down; retry elsewhere", retry_after=1)
        if self._most is not None and self.running >= self._most:
            message = f"{self.running} requests are under way, which is the most that may; retry later"
            raise Overloaded(message, retry_after=self.come_back())
        self.running += 1
        self._pace.begin()

    def leave(self, *, refused: bool = False) -> None:
        """Count it no longer. refused: no target had room for it."""
        self.running -= 1
        self._pace.end(refused=refused)

    def come_back(self) -> int:
        """Seconds after which there should be room for one more who was refused."""
        return self._pace.promise()

    async def drain(self, seconds: float) -> None:
        """Let no more in, and wait until all have left, or the time is over."""
        self.draining = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self.running and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - it ends rarely
            await asyncio.sleep(_POLL_SECONDS)


def check_size(size: int, most: int) -> None:
    """Raise InvalidRequest for a message over gRPC that is too large, before anything is made of it. In bytes."""
    if size > most:
        raise InvalidRequest(f"a request of {size} bytes is too large; at most {most} are allowed")


class Keys:
    """The keys that callers may show, and what is under way for each."""

    def __init__(self, config: GatewayConfig) -> None:
        """Those of the flags and of the environment, and the administrator's where keys are asked for."""
        keys = [*config.api_key, *os.environ.get(KEYS_VARIABLE, "").split()]
        self._keys = [key.encode() for key in keys]
        if keys and config.admin_api_key is not None:
            self._keys.append(config.admin_api_key.encode())
        self._most = config.max_requests_per_key
        self._under_way = Counter[bytes]()
        self._paces: dict[bytes, Pace] = {}  # of keys, which are known

    def check(self, authorization: bytes) -> bytes:
        """The key of a caller, by its header; empty where none is asked for. Raises Unauthenticated."""
        given = shown(authorization)
        # All are compared, and each in the same time, wherever they differ.
        known = [secrets.compare_digest(given, key) for key in self._keys]
        if self._keys and not (given and any(known)):
            reason = "wrong" if given else "missing"
            raise Unauthenticated(f"the API key is {reason}; send `Authorization: Bearer KEY`")
        return given if self._keys else b""

    @contextmanager
    def request(self, key: bytes) -> Iterator[None]:
        """While a request of a key is under way. Raises TooManyRequests."""
        if self._most is None:
            yield
            return
        pace = self._paces.setdefault(key, Pace())
        if self._under_way[key] >= self._most:
            message = f"{self._most} requests of this key are under way, which is the most that may"
            raise TooManyRequests(message, retry_after=pace.promise())
        self._under_way[key] += 1
        pace.begin()
        try:
            yield
        finally:
            pace.end()
            self._under_way[key] -= 1
            if not self._under_way[key]:
                del self._under_way[key]


def shown(authorization: bytes) -> bytes:
    """The key that a header shows; empty if none."""
    scheme, _, given = authorization.partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else b""


def check_admin(authorization: bytes, key: str | None) -> None:
    """Raise Unauthenticated unless a header shows the administrator's key, where there is one."""
    if key is not None and not secrets.compare_digest(shown(authorization), key.encode()):
        raise Unauthenticated("this needs the key of --admin-api-key; send `Authorization: Bearer KEY`")
