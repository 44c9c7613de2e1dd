"""What flags, files and the API may name: one replica, a DNS name of many, or a file of addresses.

host:port, unix:/path           one replica, as gRPC reads it
dns:name:port, dns:///name:port the replicas at all addresses of a name, in gRPC's spelling
file:/path                      the replicas that a file names, one a line
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from outrider.errors import ConfigError

_SCHEMES = ("grpc://", "grpcs://")  # of routers' worker URLs; whether TLS is used is a flag here
_GRPC_NAMES = ("ipv4:", "ipv6:", "unix-abstract:")  # addresses in gRPC's spelling


class Kind(StrEnum):
    """What a name stands for."""

    ADDRESS = "address"
    DNS = "dns"
    FILE = "file"


@dataclass(frozen=True)
class Named:
    """A name as it was given, and its parts. host, port: of a DNS name. path: of a file."""

    text: str
    kind: Kind = Kind.ADDRESS
    host: str = ""
    port: int = 0
    path: Path = Path()


def parse(text: str) -> Named:
    """The parts of a name in a flag. Raises ConfigError for a name that cannot be read."""
    if text.startswith("file:"):
        path = _after(text, "file:")
        if not path:
            raise ConfigError(f"{text!r} names no file; write file:/path")
        return Named(text, Kind.FILE, path=Path(path).expanduser())
    if text.startswith(_GRPC_NAMES):
        return Named(text)
    if not text.startswith("dns:"):
        return Named(check_address(text))
    rest = text.removeprefix("dns:")
    if rest.startswith("//"):
        server, _, rest = rest.removeprefix("//").partition("/")
        if server:
            raise ConfigError(
                f"{text!r} names the DNS server {server}; the system's resolver is used, so write dns:///NAME:PORT"
            )
    host, port = _host_and_port(rest, text)
    return Named(text, Kind.DNS, host, port)


def check_address(text: str) -> str:
    """The address of one replica, as files and the API name it. Raises ConfigError for anything else."""
    text = text.strip()
    for scheme in _SCHEMES:
        text = text.removeprefix(scheme)
    if text.startswith(("http://", "https://")):
        raise ConfigError(f"{text!r} is an HTTP address; services speak gRPC, so write HOST:PORT or grpc://HOST:PORT")
    if text.startswith("unix:"):
        if not text.removeprefix("unix:").strip("/"):
            raise ConfigError("unix: names no path; write unix:/path")
        return text
    if text.startswith(("dns:", "file:")):
        raise ConfigError(f"{text!r} is not the address of one replica; name it with --target or --draft")
    _host_and_port(text.rstrip("/"), text)
    return text.rstrip("/")


def _after(text: str, scheme: str) -> str:
    rest = text.removeprefix(scheme)
    return rest[2:] if rest.startswith("//") else rest


def _host_and_port(text: str, given: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host.strip("[]") if bracketed else host
    if not colon or not host or "/" in text or (":" in host and not bracketed) or any(c.isspace() for c in host):
        raise ConfigError(f"{given!r} is no address; write HOST:PORT, or [ADDRESS]:PORT for IPv6")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"{given!r}: {port!r} is no port; choose one from 1 to 65535")
    return host, int(port)
