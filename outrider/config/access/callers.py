"""Flags of the gateway about its callers: keys, caches that keys share, the control socket, hosts and origins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from outrider.errors import ConfigError

KEYS_VARIABLE = "OUTRIDER_API_KEY"
ADMIN_KEYS_VARIABLE = "OUTRIDER_ADMIN_API_KEY"
ANY = "*"

CacheScope = Literal["key", "all"]


@dataclass(frozen=True)
class ApiKeyOptions:
    """Keys of the gateway's callers."""

    topic: ClassVar[str] = "security"

    api_key: tuple[str, ...] = ()
    """API keys, one of which every request but health and metrics must carry; also read from OUTRIDER_API_KEY,
    separated by spaces. Default: no key is needed."""
    api_key_file: str | None = None
    """File of further API keys, one a line, so that no command line shows them."""
    admin_api_key: str | None = None
    """API key of the routes that control the targets; also read from OUTRIDER_ADMIN_API_KEY. Without one, these routes
    are closed, except on --control-socket."""
    admin_api_key_file: str | None = None
    """File of further keys for the routes that control the targets, one a line, so that no command line shows them."""
    admin_networks: tuple[str, ...] = ()
    """Networks such as 10.1.0.0/16 whose connections need no key and may control the targets, for trainers that send
    none. Only for networks where every host, and every process on it, is trusted with the model. Default: none."""
    cache_scope: CacheScope = "key"
    """Callers that share cached prefixes and stored n-grams: those with the same API key, or all. A `cache_salt` in a
    request divides them further."""

    def client_keys(self, environ: Mapping[str, str] = os.environ) -> list[str]:
        """All API keys, without the administrators'. Raises ConfigError."""
        given = _checked("--api-key", self.api_key)
        return [*given, *environ.get(KEYS_VARIABLE, "").split(), *_read("--api-key-file", self.api_key_file)]

    def admin_keys(self, environ: Mapping[str, str] = os.environ) -> list[str]:
        """All keys of administrators. Raises ConfigError."""
        given = _checked("--admin-api-key", () if self.admin_api_key is None else (self.admin_api_key,))
        from_file = _read("--admin-api-key-file", self.admin_api_key_file)
        return [*given, *environ.get(ADMIN_KEYS_VARIABLE, "").split(), *from_file]

    def networks_of_admins(self) -> list[IPv4Network | IPv6Network]:
        """Networks whose connections are administrators'. Raises ConfigError."""
        found = []
        for given in self.admin_networks:
            try:
                found.append(ip_network(given))
            except ValueError as error:
                raise ConfigError(f"--admin-networks {given} is no network: {error}; write 10.1.0.0/16") from None
        return found


@dataclass(frozen=True)
class AccessOptions:
    """Where requests to the gateway may come from."""

    topic: ClassVar[str] = "security"

    control_socket: str | None = None
    """Path of a Unix domain socket on which the gateway answers REST, and all routes are open to this user. Default:
    none; of `outrider serve`, a socket in its private folder, which it shows."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that requests may address the gateway by, a leading dot for all names below a domain, or *. Always
    allowed are IP addresses, names without a dot, the machine's name, --host, and names below localhost, internal, svc
    and cluster.local. Other names are refused, because a web page could make its own name point here."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may send requests from a browser (CORS), such as https://chat.example.com, or *. Default:
    the gateway's own chat page."""

    def check_access(self) -> None:
        """Raise ConfigError for a host or an origin that cannot be one."""
        for host in self.allowed_hosts:
            if not host.strip() or "/" in host or (ANY in host and host != ANY):
                raise ConfigError(
                    f"--allowed-hosts {host!r} is no host name; write api.example.com, .example.com, or * for any"
                )
        for origin in self.allowed_origins:
            parts = urlsplit(origin)
            if origin not in (ANY, "null") and not (parts.scheme and parts.netloc and not parts.path):
                raise ConfigError(f"--allowed-origins {origin!r} is no origin; write https://chat.example.com, or *")


def _checked(flag: str, keys: Sequence[str]) -> Sequence[str]:
    """The keys of a flag. Raises ConfigError for one that no client can send."""
    if any(not key or key != key.strip() for key in keys):
        raise ConfigError(f"{flag} is empty, or has spaces around it; is a variable of the shell not set?")
    return keys


def _read(flag: str, path: str | None) -> list[str]:
    """The keys in a file, one a line; empty without a file. Raises ConfigError for a file without keys."""
    if path is None:
        return []
    try:
        keys = Path(path).expanduser().read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{flag}: {path} cannot be read: {reason}") from None
    if not keys:
        raise ConfigError(f"{flag}: {path} has no key; write one a line")
    return keys
