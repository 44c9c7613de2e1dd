"""Admission of callers by API key (401, 403), and of requests by number: of a caller (429), and of all (503).

Requests queue in the targets, in order of priority; the gateway only bounds their number.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gateway.admission.caller import CALLER, Caller, fingerprint, within
from gateway.admission.retry_after import RetryAfter
from gateway.admission.turns import Turns
from outrider.config import GatewayConfig
from outrider.errors import Forbidden, InvalidRequest, Overloaded, TooManyRequests, Unauthenticated, Unavailable

_POLL_SECONDS = 0.02


class Admission:
    """Counts running generations, and refuses those above the limit or after draining began.

    turns: of the work for clients; a request waits for its own before its generations are counted
    """

    def __init__(self, limit: int | None = None) -> None:
        """limit: of running generations; None is no limit."""
        self.turns = Turns()
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
    """Valid API keys, the administrators' keys, and the running requests of each caller."""

    def __init__(self, config: GatewayConfig) -> None:
        """Keys of flags, environment and files. Raises ConfigError."""
        self._keys = [key.encode() for key in config.client_keys()]
        self._admin_keys = [key.encode() for key in config.admin_keys()]
        self._admin_networks = config.networks_of_admins()
        self._caches_by_key = config.cache_scope == "key"
        self._limit = config.max_requests_per_key
        self._running = Counter[str]()
        self._retry_after: dict[str, RetryAfter] = {}  # by name of a caller with a valid key

    def check(self, authorization: bytes, *, local: bool = False, network: str = "") -> Caller:
        """The sender of a request with this Authorization header, which is CALLER from now on. Raises Unauthenticated.

        An administrator's key is valid wherever another one is.

        local: the request came over the control socket, where no key is needed. network: of its connection; those of
        --admin-networks need none either
        """
        local = local or within(network, self._admin_networks)
        given = bearer_key(authorization)
        admin = _among(given, self._admin_keys)
        known = _among(given, self._keys) or admin
        if self._keys and not (known or local):
            reason = "wrong" if given else "missing"
            raise Unauthenticated(f"the API key is {reason}; send `Authorization: Bearer KEY`")
        name = fingerprint(given) if self._keys and known else ""
        caller = Caller(name, name if self._caches_by_key else "", admin or local, network)
        CALLER.set(caller)
        return caller

    def check_admin(self, caller: Caller) -> None:
        """Raise Forbidden or Unauthenticated unless the caller may control the targets."""
        if caller.admin:
            return
        if not self._admin_keys:
            raise Forbidden(
                "control routes are closed; start the gateway with --admin-api-key-file or OUTRIDER_ADMIN_API_KEY and "
                "send that key, or call them over its --control-socket, or from one of its --admin-networks"
            )
        raise Unauthenticated("this needs the key of --admin-api-key; send `Authorization: Bearer KEY`")

    @contextmanager
    def request(self, caller: Caller) -> Iterator[None]:
        """Context of a caller's running request. Raises TooManyRequests."""
        if self._limit is None:
            yield
            return
        name = caller.name
        retry_after = self._retry_after.setdefault(name, RetryAfter())
        if self._running[name] >= self._limit:
            message = f"{self._limit} requests of this key are running, which is the limit"
            raise TooManyRequests(message, retry_after=retry_after.next())
        self._running[name] += 1
        retry_after.begin()
        try:
            yield
        finally:
            retry_after.end()
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]


def _among(given: bytes, keys: Sequence[bytes]) -> bool:
    """True for one of the keys. All keys are compared, each in constant time."""
    found = [secrets.compare_digest(given, key) for key in keys]
    return bool(given) and any(found)


def bearer_key(authorization: bytes) -> bytes:
    """The key in an Authorization header; empty if there is none."""
    scheme, _, given = authorization.partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else b""
