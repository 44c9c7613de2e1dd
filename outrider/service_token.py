"""The shared token of the services: where it is read, how it is made, sent and checked.

Services and their clients (gateways, trainings) have the same token. A client sends it with every call; a service
refuses a call without it before it reads a message. The token never stands on a command line.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import grpc

from outrider.errors import ConfigError, Unauthenticated

VARIABLE = "OUTRIDER_SERVICE_TOKEN"
FLAG = "--service-token-file"
MIN_LENGTH = 16  # characters

_METADATA = "outrider-service-token"
_TOKEN_BYTES = 32  # of a new token
_READABLE = re.compile(r"[!-~]+")  # what metadata can carry, without spaces
_SCHEME = re.compile(r"(?:dns|ipv4|ipv6):(?://[^/]*/)?", re.IGNORECASE)  # of a gRPC address


def read_token(path: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The token in a file, else the one in the environment; None if there is neither. Raises ConfigError."""
    if path is None:
        given = environ.get(VARIABLE, "").strip()
        return _checked(given, VARIABLE) if given else None
    try:
        content = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"{FLAG}: {path} cannot be read: {reason}; `outrider token {path}` makes such a file"
        ) from None
    return _checked(content.strip(), f"{FLAG} {path}")


def _checked(token: str, source: str) -> str:
    if len(token) < MIN_LENGTH or not _READABLE.fullmatch(token):
        raise ConfigError(
            f"{source} holds no token: it has {len(token)} characters, and {MIN_LENGTH} or more letters, digits and "
            "signs without spaces are needed; `outrider token FILE` writes one"
        )
    return token


def new_token() -> str:
    """A random token."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def make_token_file(path: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Write the token of the environment, or a new one unless the file exists. Only this user can read the file.

    The file appears whole, and processes that make it at the same time agree on its content. Raises ConfigError.
    """
    given = read_token(None, environ)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write((given or new_token()) + "\n")
            os.fsync(file.fileno())
        try:
            if given is not None:
                os.replace(beside, path)
            else:
                with contextlib.suppress(FileExistsError):
                    os.link(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be written: {error.strerror or error}") from None
    read_token(str(path))


# --- calls ---


def token_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata of a call to a service."""
    return () if token is None else ((_METADATA, token),)


def token_check(token: str | None) -> Callable[[Mapping[str, Any]], None] | None:
    """Raises Unauthenticated for the metadata of a call without the token; None if there is no token."""
    if token is None:
        return None
    expected = token.encode()

    def check(metadata: Mapping[str, Any]) -> None:
        given = str(metadata.get(_METADATA, "")).encode()
        if not secrets.compare_digest(given, expected):
            what = "another service token than this service" if given else "no service token"
            raise Unauthenticated(f"the caller has {what}; give both the same with {FLAG} or {VARIABLE}")

    return check


def with_token(channel: grpc.aio.Channel, token: str | None) -> grpc.aio.Channel:
    """The channel, whose calls carry the token. Streams cost nothing more, unlike with an interceptor."""
    return channel if token is None else cast("grpc.aio.Channel", _TokenChannel(channel, token_metadata(token)))


class _TokenChannel:
    """A channel that adds metadata to each call."""

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._channel = channel
        self._metadata = metadata

    async def __aenter__(self) -> _TokenChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        return self._with_metadata(found) if name in _KINDS else found

    def _with_metadata(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **named: Any) -> Callable[..., Any]:
            callable_method = kind(*args, **named)

            def call(*args: Any, metadata: Iterable[tuple[str, str]] | None = None, **named: Any) -> Any:
                return callable_method(*args, metadata=(*self._metadata, *(metadata or ())), **named)

            return call

        return method


_KINDS = frozenset(("unary_unary", "unary_stream", "stream_unary", "stream_stream"))


# --- listeners ---


def check_exposure(address: str, *, closed: bool) -> None:
    """Raise ConfigError for a service that strangers on the network could call.

    closed: it requires a token or a client certificate, or the user permits strangers
    """
    if closed or is_local(address):
        return
    raise ConfigError(
        f"the service would listen on {address} for every process that reaches it: no token or client certificate is "
        f"required. Write a token with `outrider token FILE`, and give this process and its gateways the file with "
        f"{FLAG}, or its content in {VARIABLE}; or require certificates with --ssl-ca-certs; or permit strangers with "
        "--allow-unauthenticated"
    )


def is_local(address: str) -> bool:
    """True for a gRPC address that only processes of this machine reach."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = _SCHEME.sub("", address).rpartition(":")[0].strip("[]").partition("%")[0]
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(host) and all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)
