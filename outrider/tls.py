"""TLS of gRPC and HTTP: certificates in PEM files, channels that use them, and explanations of failed handshakes.

Files are checked together with the flags, so that errors are reported at start-up. Unix domain sockets are never
encrypted: their data stays on the machine, and the permissions of their folder control access.
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

_PROBE_SECONDS = 2.0  # for each part of a probe of a service

ChannelOptions = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Pair:
    """A certificate, with the chain to its authority, and its private key. certfile, keyfile: their paths."""

    certfile: str
    keyfile: str
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class ServerTls:
    """TLS of a server. ca_certs: path of the authorities of client certificates; cert_reqs: whether clients need
    one."""

    pair: Pair
    ca_certs: str | None
    cert_reqs: ssl.VerifyMode

    @property
    def credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC port, which either requires client certificates or does not ask for them."""
        required = self.cert_reqs is ssl.CERT_REQUIRED
        ca = Path(self.ca_certs).read_bytes() if required and self.ca_certs is not None else None
        return grpc.ssl_server_credentials([(self.pair.key, self.pair.certificate)], ca, required)


@dataclass(frozen=True)
class ClientTls:
    """TLS of a client. ca_certs: path of the servers' authorities. pair: the client's own certificate, or None.

    server_name: name in the server's certificate, if it is not the host of the address
    """

    ca_certs: str
    ca: bytes = field(repr=False)
    pair: Pair | None = None
    server_name: str | None = None

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials of gRPC channels."""
        return grpc.ssl_channel_credentials(self.ca, *((self.pair.key, self.pair.certificate) if self.pair else ()))

    def options(self, options: ChannelOptions) -> list[tuple[str, Any]]:
        """Options of a channel, with the expected name of the server."""
        named = [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]
        return [*options, *named]

    def context(self) -> ssl.SSLContext:
        """SSL context for HTTP, and for probes of a service."""
        context = _NamingContext(ssl.PROTOCOL_TLS_CLIENT)
        context.server_name = self.server_name
        context.load_verify_locations(self.ca_certs)
        if self.pair is not None:
            context.load_cert_chain(self.pair.certfile, self.pair.keyfile)
        return context


class _NamingContext(ssl.SSLContext):
    """Expects `server_name` in the server's certificate, if it is set; HTTP libraries expect the address's host."""

    server_name: str | None = None

    def wrap_socket(self, *args: Any, **named: Any) -> ssl.SSLSocket:
        """Wrap a socket as SSLContext does, with the expected name."""
        if self.server_name is not None:
            named["server_hostname"] = self.server_name
        return super().wrap_socket(*args, **named)


# --- files ---


def server_tls(
    certfile: str | None, keyfile: str | None, ca_certs: str | None, cert_reqs: int | None
) -> ServerTls | None:
    """TLS of the flags --ssl-...; None without TLS. Raises ConfigError, with the flag, for files that do not fit."""
    pair = read_pair(certfile, keyfile, "ssl")
    if pair is None:
        if ca_certs is not None:
            raise ConfigError("--ssl-ca-certs needs TLS; set --ssl-certfile and --ssl-keyfile, too")
        return None
    if cert_reqs is not None and cert_reqs not in (0, 1, 2):
        raise ConfigError(f"--ssl-cert-reqs is 0 (never), 1 (if they have one) or 2 (always), not {cert_reqs}")
    if ca_certs is None:
        if cert_reqs:
            raise ConfigError(f"--ssl-cert-reqs {cert_reqs} asks for client certificates; name their authority "
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
    """TLS of connections to servers; None without TLS. Raises ConfigError for files that do not fit.

    prefix: of the flags in error messages
    """
    if ca_certs is None:
        if certfile is not None or keyfile is not None or server_name is not None:
            raise ConfigError(f"name the authority of the services' certificates with --{prefix}-ca-certs, too")
        return None
    pair = read_pair(certfile, keyfile, prefix)
    return ClientTls(ca_certs, read_authorities(ca_certs, f"--{prefix}-ca-certs"), pair, server_name)


def read_pair(certfile: str | None, keyfile: str | None, prefix: str) -> Pair | None:
    """A certificate and its key; None if neither is set. Raises ConfigError if they cannot be read or do not match."""
    cert_flag, key_flag = f"--{prefix}-certfile", f"--{prefix}-keyfile"
    if certfile is None or keyfile is None:
        if certfile is not None or keyfile is not None:
            here, missing = (cert_flag, key_flag) if keyfile is None else (key_flag, cert_flag)
            raise ConfigError(f"{here} needs {missing}, too")
        return None
    certificate, key = _read(certfile, cert_flag), _read(keyfile, key_flag)
    if b"ENCRYPTED" in key:
        raise ConfigError(f"the key in {keyfile} ({key_flag}) has a passphrase; save it without one")
    _check_certificates(certificate, certfile, cert_flag)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"the key in {keyfile} ({key_flag}) does not match the certificate in {certfile} ({cert_flag})"
            raise ConfigError(message) from None
        raise ConfigError(f"{keyfile} ({key_flag}) holds no private key in PEM form") from None
    return Pair(certfile, keyfile, certificate, key)


def read_authorities(path: str, flag: str) -> bytes:
    """Certificates of authorities, as PEM. Raises ConfigError."""
    content = _read(path, flag)
    _check_certificates(content, path, flag)
    return content


def _read(path: str, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} ({flag}) cannot be read: {error.strerror}") from None


def _check_certificates(content: bytes, path: str, flag: str) -> None:
    # Comments between certificates may have any characters; the library accepts ASCII only.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"{path} ({flag}) holds no certificate in PEM form") from None


# --- channels ---


def open_channel(address: str, options: ChannelOptions, tls: ClientTls | None) -> grpc.aio.Channel:
    """An asynchronous channel to a service: encrypted with `tls`, except to a Unix domain socket."""
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials, options=tls.options(options))


def open_blocking_channel(address: str, options: ChannelOptions, tls: ClientTls | None) -> grpc.Channel:
    """A blocking channel to a service: encrypted with `tls`, except to a Unix domain socket."""
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials, options=tls.options(options))


# --- failed handshakes ---


async def explain_tls_failure(address: str, tls: ClientTls | None) -> str | None:
    """Why TLS fails between this process and a service, as the predicate of "the service ..."; None if TLS works.

    gRPC reports only a lost connection, so this function opens a connection of its own.
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
            return None  # the service has no TLS either
    return "speaks TLS; name the authority of its certificate with --service-ssl-ca-certs"


async def _explain_with_tls(host: str, port: int, tls: ClientTls) -> str | None:
    try:
        accepted = await _handshake(host, port, tls.context(), tls.server_name or host)
    except ssl.SSLCertVerificationError as error:
        return (
            f"shows a certificate that is not trusted: {error.verify_message} (--service-ssl-ca-certs {tls.ca_certs})"
        )
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return "speaks no TLS; leave --service-ssl-ca-certs out, or start it with --ssl-certfile and --ssl-keyfile"
        accepted = False
    if accepted:
        return None
    if tls.pair is None:
        return "asks for a certificate; name one with --service-ssl-certfile and --service-ssl-keyfile"
    return (
        f"does not accept our certificate; did its authority sign that of --service-ssl-certfile {tls.pair.certfile}?"
    )


async def _handshake(host: str, port: int, context: ssl.SSLContext, name: str) -> bool:
    """Do the TLS handshake of a gRPC client. Returns False if the server closes the connection after it.

    Raises SSLError, OSError, TimeoutError.
    """
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.wait_for(
        asyncio.open_connection(host, port, ssl=context, server_hostname=name), _PROBE_SECONDS
    )
    try:
        # In TLS 1.3 a client is connected before the server has seen its certificate. A gRPC server that accepts the
        # client sends its settings first; one that does not sends nothing.
        return await asyncio.wait_for(reader.read(1), _PROBE_SECONDS) != b""
    except ConnectionError:
        return False
    finally:
        writer.transport.abort()
