"""Flags of TLS, for processes that listen and for those that connect."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.tls import ClientTls, ServerTls, client_tls, server_tls


@dataclass(frozen=True)
class TlsOptions:
    """How a process that listens on TCP shows who it is, and who may connect."""

    ssl_certfile: str | None = None
    """Certificate of the ports that this process listens on (PEM, with those that lead to its authority); they then
    speak TLS alone. Unix domain sockets are never encrypted."""
    ssl_keyfile: str | None = None
    """Private key of the certificate (PEM, without a passphrase)."""
    ssl_ca_certs: str | None = None
    """Certificates of authorities (PEM): clients must show one that they signed, so that TLS is mutual."""
    ssl_cert_reqs: int | None = None
    """Whether clients must show certificates: 0 never, 1 if they have one (REST alone), 2 always; 2 by default where
    --ssl-ca-certs is given."""

    def server_tls(self) -> ServerTls | None:
        """The files, read and checked; None without TLS. Raises ConfigError."""
        return server_tls(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs, self.ssl_cert_reqs)


@dataclass(frozen=True)
class ServiceTlsOptions:
    """How a process knows the services that it connects to, and what it shows them."""

    service_ssl_ca_certs: str | None = None
    """Certificates of the authorities (PEM) that signed those of the services; connections then are TLS, but for
    Unix domain sockets."""
    service_ssl_certfile: str | None = None
    """Certificate shown to services that ask for one (PEM)."""
    service_ssl_keyfile: str | None = None
    """Private key of that certificate (PEM, without a passphrase)."""
    service_ssl_server_name: str | None = None
    """Name in the services' certificates, where it is not the host of their addresses."""

    def service_tls(self) -> ClientTls | None:
        """The files, read and checked; None without TLS. Raises ConfigError."""
        return client_tls(
            self.service_ssl_ca_certs, self.service_ssl_certfile, self.service_ssl_keyfile, self.service_ssl_server_name
        )
