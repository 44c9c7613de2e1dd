"""The sender of a request: its name, the caches that it shares, and whether it may control the targets."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple
from urllib.parse import unquote


class Caller(NamedTuple):
    """A sender of requests.

    name: of the owner of request ids and limits, one a key; empty without API keys
    caches: callers with equal values share cached prefixes and stored n-grams
    admin: may control the targets, and end requests of others
    network: that its connection comes from; empty for a local one
    """

    name: str = ""
    caches: str = ""
    admin: bool = False
    network: str = ""

    @property
    def owner(self) -> str | None:
        """The callers whose requests it may end: those of this name; None for all."""
        return None if self.admin else self.name

    @property
    def identity(self) -> str:
        """Callers with different values take turns in the services. Without API keys, those are networks."""
        return self.name or self.network


ANYBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
"""Of the request that the present task answers."""


_HOSTS_BITS = 64  # of an IPv6 network whose addresses one host may choose among


def client_network(client: Sequence[Any] | None) -> str:
    """The network of a connection over HTTP. client: address and port, as of ASGI; None for a local socket."""
    return _network(str(client[0])) if client else ""


def peer_network(peer: str) -> str:
    """The network of a gRPC peer, such as `ipv6:%5B::1%5D:1234`; empty for a local socket."""
    kind, _, address = peer.partition(":")
    return _network(unquote(address).rpartition(":")[0].strip("[]")) if kind in ("ipv4", "ipv6") else ""


def _network(host: str) -> str:
    """An IPv4 address, or the network of an IPv6 address; another name as it is."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address) >> _HOSTS_BITS << _HOSTS_BITS, _HOSTS_BITS)))


def within(network: str, others: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    """True if a connection's network, as of `client_network`, lies in one of the others."""
    if not network or not others:
        return False
    try:
        own = ipaddress.ip_network(network)
    except ValueError:
        return False
    return any(own.version == other.version and own.subnet_of(other) for other in others)  # type: ignore[arg-type]


def fingerprint(key: bytes) -> str:
    """A name of a key that does not reveal it: the same in all gateways, because they may share targets."""
    return hashlib.blake2b(key, digest_size=16, person=b"outrider caller").hexdigest()
