"""How the gateway connects to the services; the same for all replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace

import grpc

from outrider.config import StreamTransport
from outrider.service_token import with_token
from outrider.tls import ClientTls, open_channel
from outrider.transport.rpc import CHANNEL_OPTIONS


@dataclass(frozen=True)
class Connection:
    """tls: of channels; None for plain text. transport: what frames may use. token: of the services."""

    tls: ClientTls | None = None
    transport: StreamTransport = "grpc"
    token: str | None = None

    def named(self, server_name: str) -> Connection:
        """For replicas found by a DNS name: without another name in the flags, their certificates carry that one."""
        if self.tls is None or self.tls.server_name is not None:
            return self
        return replace(self, tls=replace(self.tls, server_name=server_name))

    def open(self, address: str) -> grpc.aio.Channel:
        """A channel to a replica, whose calls carry the token."""
        return with_token(open_channel(address, CHANNEL_OPTIONS, self.tls), self.token)


PLAIN = Connection()
"""No encryption, no token, frames over gRPC."""
