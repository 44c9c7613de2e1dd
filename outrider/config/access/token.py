"""The token that services require of their callers."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import ClassVar

from outrider.config.access.tls import TlsOptions
from outrider.service_token import check_exposure, read_token
from outrider.tls import ServerTls


@dataclass(frozen=True)
class ServiceTokenOptions:
    """The token of the services."""

    topic: ClassVar[str] = "security"

    service_token_file: str | None = None
    """File with the token that target and draft services require of their callers, and gateways send; `outrider token`
    writes one. Also read from OUTRIDER_SERVICE_TOKEN. Default: none; `serve` makes one in its private folder."""

    def service_token(self) -> str | None:
        """The token; None without one. Raises ConfigError."""
        return read_token(self.service_token_file)


@dataclass(frozen=True)
class StrangerOptions:
    """Whether strangers may call a service."""

    topic: ClassVar[str] = "security"

    allow_unauthenticated: bool = False
    """Listen on an address that other machines reach without requiring a token or a client certificate; any process
    there can then use and control the service. Default: refused."""


@dataclass(frozen=True)
class ServicePortOptions(StrangerOptions, ServiceTokenOptions, TlsOptions):
    """Security of a service's port."""

    def port_security(self, listen: str) -> tuple[ServerTls | None, str | None]:
        """TLS and token of the port. listen: its address. Raises ConfigError if strangers could call the service."""
        tls, token = self.server_tls(), self.service_token()
        certified = tls is not None and tls.cert_reqs is ssl.CERT_REQUIRED
        check_exposure(listen, closed=certified or token is not None or self.allow_unauthenticated)
        return tls, token
