"""Admission of callers by API key, and of requests by number until the gateway drains.

Requests queue in the targets, in order of priority; the gateway only bounds their number.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.admission.retry_after import RetryAfter
from outrider.config import GatewayConfig
from outrider.errors import InvalidRequest, Overloaded, TooManyRequests, Unauthenticated, Unavailable

KEYS_VARIABLE = "OUTRIDER_API_KEY"
_POLL_SECONDS = 0.02


class Admission:
    """Counts running generations, and refuses those above the limit or after draining began."""

    def __init__(self, limit: int | None = None) -> None:
        """limit: of running generations; None is no limit."""
        self.draining = False
        self.running = 0
        self._limit = limit
        self._retry_after = RetryAfter()

    def check(self, count: int) -> None:
        """Raise InvalidRequest for more generations at once than may ever run together."""
        if self._limit is not None and count > self._limit:
            raise InvalidRequest(
                f"the request has {count} answers; at most {self._limit} may run together; request fewer"
            )

    def enter(self) -> None:
        """Count a generation. Raises Overloaded, Unavailable."""
        if self.draining:
            raise Unavailable("the gateway is shutting down; retry elsewhere", retry_after=1)
        if self._limit is not None and self.running >= self._limit:
            message = f"{self.running} requests are running, which is the limit; retry later"
            raise Overloaded(message, retry_after=self.retry_after())
        self.running += 1
        self._retry_after.begin()

    def leave(self, *, refused: bool = False) -> None:
        """A counted generation ended. refused: no target had room for it."""
        self.running -= 1
        self._retry_after.end(refused=refused)

    def retry_after(self) -> int:
        """Seconds after which a refused request should find room."""
        return self._retry_after.next()

    async def drain(self, seconds: float) -> None:
        """Refuse new generations, and wait until all have ended, at most `seconds`."""
        self.draining = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self.running and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - runs once
            await asyncio.sleep(_POLL_SECONDS)


def check_size(size: int, limit: int) -> None:
    """Raise InvalidRequest for a gRPC message that is too large, before it is processed. Sizes in bytes."""
    if size > limit:
        raise InvalidRequest(f"a request of {size} bytes is too large; at most {limit} are allowed")


class Keys:
    """Valid API keys, and the running requests of each."""

    def __init__(self, config: GatewayConfig) -> None:
        """Keys of the flags and the environment; if there are any, the administrator's key is valid as well."""
        keys = [*config.api_key, *os.environ.get(KEYS_VARIABLE, "").split()]
        self._keys = [key.encode() for key in keys]
        if keys and config.admin_api_key is not None:
            self._keys.append(config.admin_api_key.encode())
        self._limit = config.max_requests_per_key
        self._running = Counter[bytes]()
        self._retry_after: dict[bytes, RetryAfter] = {}  # by valid key

    def check(self, authorization: bytes) -> bytes:
        """The key in an Authorization header; empty if no key is required. Raises Unauthenticated."""
        given = bearer_key(authorization)
        # All keys are compared in constant time.
        known = [secrets.compare_digest(given, key) for key in self._keys]
        if self._keys and not (given and any(known)):
            reason = "wrong" if given else "missing"
            raise Unauthenticated(f"the API key is {reason}; send `Authorization: Bearer KEY`")
        return given if self._keys else b""

    @contextmanager
    def request(self, key: bytes) -> Iterator[None]:
        """Context of a running request of a key. Raises TooManyRequests."""
        if self._limit is None:
            yield
            return
        retry_after = self._retry_after.setdefault(key, RetryAfter())
        if self._running[key] >= self._limit:
            message = f"{self._limit} requests of this key are running, which is the limit"
            raise TooManyRequests(message, retry_after=retry_after.next())
        self._running[key] += 1
        retry_after.begin()
        try:
            yield
        finally:
            retry_after.end()
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]


def bearer_key(authorization: bytes) -> bytes:
    """The key in an Authorization header; empty if there is none."""
    scheme, _, given = authorization.partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else b""


def check_admin(authorization: bytes, key: str | None) -> None:
    """Raise Unauthenticated unless the header has the administrator's key, if there is one."""
    if key is not None and not secrets.compare_digest(bearer_key(authorization), key.encode()):
        raise Unauthenticated("this needs the key of --admin-api-key; send `Authorization: Bearer KEY`")
