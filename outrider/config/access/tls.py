"""TLS flags of processes that listen, and of processes that connect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.tls import ClientTls, ServerTls, client_tls, server_tls


@dataclass(frozen=True)
class TlsOptions:
    """TLS of the TCP ports that a process listens on."""

    topic: ClassVar[str] = "security"

    ssl_certfile: str | None = None
    """Certificate of the ports of this process (PEM, with the chain to its authority); the ports then accept TLS only.
    Unix domain sockets are never encrypted. Default: no TLS."""
    ssl_keyfile: str | None = None
    """Private key of --ssl-certfile (PEM, without a passphrase)."""
    ssl_ca_certs: str | None = None
    """Authorities (PEM) that must have signed the clients' certificates (mutual TLS). Default: clients show none."""
    ssl_cert_reqs: int | None = None
    """Whether clients must show a certificate: 0 never, 1 optional (REST only), 2 always. Default: 2 with
    --ssl-ca-certs, else 0."""

    def server_tls(self) -> ServerTls | None:
        """The files, read and checked; None without TLS. Raises ConfigError."""
        return server_tls(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs, self.ssl_cert_reqs)


@dataclass(frozen=True)
class ServiceTlsOptions:
    """TLS of a process's connections to the services."""

    topic: ClassVar[str] = "security"

    service_ssl_ca_certs: str | None = None
    """Authorities (PEM) that signed the services' certificates; connections then use TLS, except on Unix domain
    sockets. Default: no TLS."""
    service_ssl_certfile: str | None = None
    """Client certificate for services that require one (PEM)."""
    service_ssl_keyfile: str | None = None
    """Private key of --service-ssl-certfile (PEM, without a passphrase)."""
    service_ssl_server_name: str | None = None
    """Host name expected in the services' certificates. Default: the host of the address."""

    def service_tls(self) -> ClientTls | None:
        """The files, read and checked; None without TLS. Raises ConfigError."""
        return client_tls(
            self.service_ssl_ca_certs, self.service_ssl_certfile, self.service_ssl_keyfile, self.service_ssl_server_name
        )
