"""TLS of gRPC and HTTP: certificates in files, channels that use them, and why a peer cannot be understood.

Files are PEM. They are checked when the flags are, so that a wrong one is said at start-up. Unix domain sockets are
never encrypted: what they carry does not leave the machine, and their folder says who may use them.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from outrider.errors import ConfigError

_PROBE_SECONDS = 2.0  # for each part of a look at how a service answers

ChannelOptions = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Pair:
    """A certificate, with those that lead to its authority, and its private key. certfile, keyfile: their paths."""

    certfile: str
    keyfile: str
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class ServerTls:
    """How a server shows who it is. ca_certs: whose certificates clients may show; cert_reqs: whether they must."""

    pair: Pair
    ca_certs: str | None
    cert_reqs: ssl.VerifyMode

    @property
    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC port, which knows only clients that must show a certificate and such as are not asked."""
        required = self.cert_reqs is ssl.CERT_REQUIRED
        ca = Path(self.ca_certs).read_bytes() if required and self.ca_certs is not None else None
        return grpc.ssl_server_credentials([(self.pair.key, self.pair.certificate)], ca, required)


@dataclass(frozen=True)
class ClientTls:
    """How a client knows a server: by certificates of `ca_certs`. pair: what it shows itself, if anything.

    server_name: name that must stand in the server's certificate, if it is not the host of the address
    """

    ca_certs: str
    ca: bytes = field(repr=False)
    pair: Pair | None = None
    server_name: str | None = None

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """For gRPC channels."""
        return grpc.ssl_channel_credentials(self.ca, *((self.pair.key, self.pair.certificate) if self.pair else ()))

    def options(self, options: ChannelOptions) -> list[tuple[str, Any]]:
        """Options of a channel, with the name that the server is to have."""
        named = [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]
        return [*options, *named]

    def context(self) -> ssl.SSLContext:
        """For HTTP, and for a look at a service."""
        context = _NamingContext(ssl.PROTOCOL_TLS_CLIENT)
        context.server_name = self.server_name
        context.load_verify_locations(self.ca_certs)
        if self.pair is not None:
            context.load_cert_chain(self.pair.certfile, self.pair.keyfile)
        return context


class _NamingContext(ssl.SSLContext):
    """Expects a server of the name that it has, where it has one: HTTP libraries know the host of the address alone."""

    server_name: str | None = None

    def wrap_socket(self, *args: Any, **named: Any) -> ssl.SSLSocket:
        """As of SSLContext."""
        if self.server_name is not None:
            named["server_hostname"] = self.server_name
        return super().wrap_socket(*args, **named)


# --- files ---


def server_tls(
    certfile: str | None, keyfile: str | None, ca_certs: str | None, cert_reqs: int | None
) -> ServerTls | None:
    """What the flags --ssl-... say; None without TLS. Raises ConfigError for files that do not fit, naming the flag."""
    pair = read_pair(certfile, keyfile, "ssl")
    if pair is None:
        if ca_certs is not None:
            raise ConfigError("--ssl-ca-certs is for clients of a TLS port; give --ssl-certfile and --ssl-keyfile, too")
        return None
    if cert_reqs is not None and cert_reqs not in (0, 1, 2):
        raise ConfigError(f"--ssl-cert-reqs is 0 (never), 1 (if they have one) or 2 (always), not {cert_reqs}")
    if ca_certs is None:
        if cert_reqs:
            raise ConfigError(f"--ssl-cert-reqs {cert_reqs} asks for certificates of clients; name their authority "
                              "with --ssl-ca-certs")  # fmt: skip
        return ServerTls(pair, None, ssl.CERT_NONE)
    read_authorities(ca_certs, "--ssl-ca-certs")
    return ServerTls(pair, ca_certs, ssl.CERT_REQUIRED if cert_reqs is None else ssl.VerifyMode(cert_reqs))


def client_tls(
    ca_certs: str | None,
    certfile: str | None = None,
    keyfile: str | None = None,
    server_name: str | None = None,
    *,
    prefix: str = "service-ssl",
) -> ClientTls | None:
    """How to reach servers; None without TLS. Raises ConfigError for files that do not fit.

    prefix: of the flags that errors name
    """
    if ca_certs is None:
        if certfile is not None or keyfile is not None or server_name is not None:
            raise ConfigError(f"name the authority of the services' certificates with --{prefix}-ca-certs, too")
        return None
    pair = read_pair(certfile, keyfile, prefix)
    return ClientTls(ca_certs, read_authorities(ca_certs, f"--{prefix}-ca-certs"), pair, server_name)


def read_pair(certfile: str | None, keyfile: str | None, prefix: str) -> Pair | None:
    """A certificate and its key; None without both. Raises ConfigError if they are not readable, or do not match."""
    cert_flag, key_flag = f"--{prefix}-certfile", f"--{prefix}-keyfile"
    if certfile is None or keyfile is None:
        if certfile is not None or keyfile is not None:
            here, missing = (cert_flag, key_flag) if keyfile is None else (key_flag, cert_flag)
            raise ConfigError(f"{here} needs {missing}, too")
        return None
    certificate, key = _read(certfile, cert_flag), _read(keyfile, key_flag)
    if b"ENCRYPTED" in key:
        raise ConfigError(f"the key in {keyfile} ({key_flag}) has a passphrase; write it into a file without one")
    _check_certificates(certificate, certfile, cert_flag)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"the key in {keyfile} ({key_flag}) is not that of the certificate in {certfile} ({cert_flag})"
            raise ConfigError(message) from None
        raise ConfigError(f"{keyfile} ({key_flag}) holds no private key in PEM form") from None
    return Pair(certfile, keyfile, certificate, key)


def read_authorities(path: str, flag: str) -> bytes:
    """Certificates of authorities. Raises ConfigError."""
    content = _read(path, flag)
    _check_certificates(content, path, flag)
    return content


def _read(path: str, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} ({flag}) cannot be read: {error.strerror}") from None


def _check_certificates(content: bytes, path: str, flag: str) -> None:
    # Comments between certificates may be in any letters, which the library does not take.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"{path} ({flag}) holds no certificate in PEM form") from None


# --- channels ---


def open_channel(address: str, options: ChannelOptions, tls: ClientTls | None) -> grpc.aio.Channel:
    """A channel to a service: encrypted if there is `tls`, but never to a Unix domain socket."""
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials, options=tls.options(options))


def open_blocking_channel(address: str, options: ChannelOptions, tls: ClientTls | None) -> grpc.Channel:
    """The same for callers that wait."""
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials, options=tls.options(options))


# --- why it does not work ---


async def explain_tls_failure(address: str, tls: ClientTls | None) -> str | None:
    """Why TLS fails between us and the service at an address, in words that go on "the service ..."; None if it is not
    TLS that fails.

    gRPC says only that a connection was lost, so this opens one of its own.
    """
    host, _, port = address.rpartition(":")
    if address.startswith("unix:") or not port.isdigit():
        return None
    host = host.strip("[]")
    try:
        async with asyncio.timeout(2 * _PROBE_SECONDS):
            return await (
                _explain_without_tls(host, int(port)) if tls is None else _explain_with_tls(host, int(port), tls)
            )
    except (TimeoutError, OSError):
        return None


async def _explain_without_tls(host: str, port: int) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        await _handshake(host, port, context, host)
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return None  # what answers does not know TLS either
    return "speaks TLS; name the authority of its certificate with --service-ssl-ca-certs"


async def _explain_with_tls(host: str, port: int, tls: ClientTls) -> str | None:
    try:
        welcome = await _handshake(host, port, tls.context(), tls.server_name or host)
    except ssl.SSLCertVerificationError as error:
        return (
            f"shows a certificate that is not trusted: {error.verify_message} (--service-ssl-ca-certs {tls.ca_certs})"
        )
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return "speaks no TLS; leave --service-ssl-ca-certs out, or start it with --ssl-certfile and --ssl-keyfile"
        welcome = False
    if welcome:
        return None
    if tls.pair is None:
        return "asks for a certificate; name one with --service-ssl-certfile and --service-ssl-keyfile"
    return (
        f"does not accept our certificate; did its authority sign that of --service-ssl-certfile {tls.pair.certfile}?"
    )


async def _handshake(host: str, port: int, context: ssl.SSLContext, name: str) -> bool:
    """Shake hands as a gRPC client does. False if the server then ends the connection: it does not agree.

    Raises SSLError, OSError, TimeoutError.
    """
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.wait_for(
        asyncio.open_connection(host, port, ssl=context, server_hostname=name), _PROBE_SECONDS
    )
    try:
        # In TLS 1.3 a client believes itself connected before the server has seen its certificate. One that agrees
        # speaks first, of its settings; gRPC's says nothing when it does not.
        return await asyncio.wait_for(reader.read(1), _PROBE_SECONDS) != b""
    except ConnectionError:
        return False
    finally:
        writer.transport.abort()
