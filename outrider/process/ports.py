"""Ports and Unix domain sockets of this machine. A process binds them first, so that a conflict is reported at once."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from outrider.errors import ConfigError

_MAX_PATH_BYTES = 107  # of a Unix domain socket's path
_RESERVED_BYTES = 48  # of that path: for the name of a private folder and of a socket in it
_BACKLOG = 2048  # connections that wait to be accepted


def host_and_port(host: str, port: int) -> str:
    """An address of host and port; an IPv6 host is put into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def take_port(host: str, port: int, flag: str, *, shared: bool = False, listens: bool = False) -> socket.socket:
    """A socket bound to a port. shared: other sockets may bind it, too (SO_REUSEPORT). listens: the socket listens.

    Two processes that start at the same time can both bind a port, but only one of them can listen on it.

    flag: the flag that chooses the port, for messages. Raises ConfigError for a port in use, and for a host that is no
    address.
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


def free_ports(host: str, count: int) -> list[int]:
    """Different TCP ports of an address of this machine that no process uses at the moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def socket_path(address: str) -> str | None:
    """Path of the Unix domain socket of a gRPC address; None unless the address is "unix:path"."""
    if not address.startswith("unix:"):
        return None
    path = address.removeprefix("unix:")
    return path[2:] if path.startswith("//") else path


def check_socket_path(path: str) -> None:
    """Raise ConfigError for a path that cannot be a Unix domain socket."""
    if not path:
        raise ConfigError("unix: names no path; write unix:/path")
    if (size := len(os.fsencode(path))) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"a Unix domain socket's path has at most {_MAX_PATH_BYTES} bytes, and {path} has {size}; choose another"
        )
    if not (folder := Path(path).parent).is_dir():
        raise ConfigError(f"there is no folder {folder} for the socket {path}; make it, or choose another path")


def take_private_socket(path: str, flag: str) -> socket.socket:
    """A Unix domain socket that only this user can connect to; it replaces one that a dead process left behind.

    flag: the flag that chooses the path, for messages. Raises ConfigError for a path that cannot be used.
    """
    check_socket_path(path)
    refuse_used_socket(path)
    taken = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        taken.bind(path)
        os.chmod(path, 0o600)  # before it listens, so that no other user has connected
        taken.listen(_BACKLOG)
    except OSError as error:
        taken.close()
        raise ConfigError(f"{flag} {path} cannot be bound ({error.strerror}); choose another path") from None
    return taken


@contextlib.contextmanager
def socket_folder(prefix: str) -> Iterator[Path]:
    """A private folder for Unix domain sockets, removed at the end. It is in the folder for temporary files, or in /tmp
    if that folder's path is too long.

    prefix: of the folder's name, at most 17 letters. Raises ConfigError if the folder cannot be created.
    """
    try:
        usual = tempfile.gettempdir()
        above = usual if len(os.fsencode(usual)) <= _MAX_PATH_BYTES - _RESERVED_BYTES else "/tmp"
        made = tempfile.TemporaryDirectory(prefix=prefix, dir=above)
    except OSError as error:
        raise ConfigError(
            f"no folder for sockets can be created ({error.strerror}); set TMPDIR to a writable folder "
            f"with a path of at most {_MAX_PATH_BYTES - _RESERVED_BYTES} bytes"
        ) from None
    with made as folder:
        yield Path(folder)


def refuse_used_socket(path: str) -> None:
    """Raise ConfigError if a process listens on a Unix domain socket.

    Binding replaces the file, which a dead process may have left behind; this check keeps it from replacing the socket
    of a live process.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except OSError as error:
            # EAGAIN: the backlog is full. EPROTOTYPE: a live socket of another type. Both have a process behind them.
            if error.errno not in (errno.EAGAIN, errno.EPROTOTYPE):
                return
    raise ConfigError(f"another process listens at {path}; end it, or choose another address")
