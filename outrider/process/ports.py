"""Ports and Unix domain sockets of this machine: one in use is named before anything is loaded."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from outrider.errors import ConfigError

_LONGEST_PATH = 107  # bytes of a Unix domain socket's path
_ROOM = 48  # of which so many stay for a private folder below the one for such, and for names in it


def host_and_port(host: str, port: int) -> str:
    """Both as an address; those of IPv6 have colons themselves."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_BACKLOG = 2048  # connections that wait to be taken


def take_port(host: str, port: int, flag: str, *, shared: bool = False, listens: bool = False) -> socket.socket:
    """A socket that is bound. shared: others may bind there, too. listens: it takes connections already.

    Of two processes that start at once both may bind a port, but one alone can listen there.

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
        if listens:
            taken.listen(_BACKLOG)
    except OSError as error:
        taken.close()
        reason = "is in use" if "in use" in str(error) else f"cannot be bound ({error.strerror})"
        raise ConfigError(f"port {port} of {host} {reason}; choose another with {flag}") from None
    return taken


def socket_path(address: str) -> str | None:
    """Path of the Unix domain socket of a gRPC address; None unless that is "unix:path"."""
    if not address.startswith("unix:"):
        return None
    path = address.removeprefix("unix:")
    return path[2:] if path.startswith("//") else path


def check_socket_path(path: str) -> None:
    """Raise ConfigError for a path where no Unix domain socket can be."""
    if not path:
        raise ConfigError("unix: names no path; write unix:/path")
    if (size := len(os.fsencode(path))) > _LONGEST_PATH:
        raise ConfigError(
            f"the path of a Unix domain socket has at most {_LONGEST_PATH} bytes, and {path} has {size}; choose another"
        )
    if not (folder := Path(path).parent).is_dir():
        raise ConfigError(f"there is no folder {folder} for the socket {path}; make it, or choose another path")


@contextlib.contextmanager
def socket_folder(prefix: str) -> Iterator[Path]:
    """A private folder for Unix domain sockets, gone with the context: where temporary files are, or below /tmp where
    the path of that is too long.

    prefix: of its name, at most 17 letters. Raises ConfigError where no such folder can be made.
    """
    try:
        usual = tempfile.gettempdir()
        above = usual if len(os.fsencode(usual)) <= _LONGEST_PATH - _ROOM else "/tmp"
        made = tempfile.TemporaryDirectory(prefix=prefix, dir=above)
    except OSError as error:
        raise ConfigError(
            f"no folder for sockets can be made ({error.strerror}); let TMPDIR name a folder that can be written, "
            f"with a path of at most {_LONGEST_PATH - _ROOM} bytes"
        ) from None
    with made as folder:
        yield Path(folder)


def refuse_used_socket(path: str) -> None:
    """Raises ConfigError if a process listens at a Unix domain socket.

    Whoever binds there replaces the file, as one may be left behind by a process that has gone; nothing but this keeps
    it from taking the place of one that is alive.
    """
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.setblocking(False)
        try:
            visitor.connect(path)
        except OSError as error:
            # Too many wait to be let in; or it is of another kind, which is said only of one that is alive.
            if error.errno not in (errno.EAGAIN, errno.EPROTOTYPE):
                return
    raise ConfigError(f"another process listens at {path}; end it, or choose another address")
