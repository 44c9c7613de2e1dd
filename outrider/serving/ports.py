"""Ports of this machine: taken early, so that one in use is named before anything is loaded."""

from __future__ import annotations

import socket

from outrider.errors import ConfigError


def host_and_port(host: str, port: int) -> str:
    """Both as an address; those of IPv6 have colons themselves."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def take_port(host: str, port: int, flag: str, *, shared: bool = False) -> socket.socket:
    """A socket that is bound and does not listen yet. shared: others may bind there, too.

    flag: that chooses the port. Raises ConfigError for a port in use, and for a host that is no address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is no address: {error.strerror or error}") from None
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        reason = "is in use" if "in use" in str(error) else f"cannot be bound ({error.strerror})"
        raise ConfigError(f"port {port} of {host} {reason}; choose another with {flag}") from None
    return taken
