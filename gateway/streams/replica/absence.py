"""Why a replica is not used: the reason of the last attempt to use it that failed, logged when it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from gateway.streams.availability import Availability, ReplicaState, after
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.tls import ClientTls, explain_tls_failure

log = logging.getLogger(__name__)

Info = TypeVar("Info")


class Absence:
    """Outlives the attempts. Lives in one event loop.

    reason: with the state that goes with it. refusal: why the replica does not fit; None if it does
    settled: set once the first handshake has succeeded, or was refused
    """

    def __init__(self, service: str, address: str, tls: ClientTls | None) -> None:
        self._service, self._address, self._tls = service, address, tls
        self.reason = Availability(ReplicaState.UNREACHABLE, "not connected yet")
        self.refusal: ConfigError | None = None
        self.settled = asyncio.Event()
        self._probed: str | None = None  # gRPC's reason for the failed connection that TLS was probed for last

    def set(self, reason: Availability) -> None:
        """The replica is not used, for this reason."""
        if reason != self.reason:
            level = logging.WARNING if reason.state is ReplicaState.FAILED else logging.DEBUG
            log.log(level, "the %s at %s: %s", self._service, self._address, reason.reason)
        self.reason = reason

    def refused(self, error: ConfigError, state: ReplicaState) -> None:
        """The replica does not fit."""
        if self.refusal is None or self.refusal.message != error.message:
            log.error("%s", error.message)
        self.refusal = error
        self.settled.set()
        self.set(Availability(state, error.message))

    def failed(self, error: Exception) -> None:
        """An attempt has failed, or a stream has ended, by an error that is no refusal."""
        if isinstance(error, grpc.aio.AioRpcError):
            self.set(after(error))
        elif isinstance(error, Unavailable):
            self.set(Availability(ReplicaState.STARTING, error.message))
        elif isinstance(error, OutriderError):
            log.warning("%s at %s: %s", self._service, self._address, error.message)
            self.set(Availability(ReplicaState.FAILED, error.message))
        else:
            log.error("a frame of the %s at %s could not be processed", self._service, self._address, exc_info=error)
            self.set(Availability(ReplicaState.FAILED, f"{type(error).__name__}: {error}"))

    async def explained(self, handshake: Awaitable[Info]) -> Info:
        """The result of a handshake. Raises ConfigError where gRPC's error means that the replica does not fit."""
        try:
            return await handshake
        except grpc.aio.AioRpcError as error:
            await self._explain(error)
            raise

    async def _explain(self, error: grpc.aio.AioRpcError) -> None:
        where = f"the {self._service} at {self._address}"
        # One probe per message, because the probe opens a connection of its own.
        if error.code() is grpc.StatusCode.UNAVAILABLE and error.details() != self._probed:
            self._probed = error.details()
            if trouble := await explain_tls_failure(self._address, self._tls):
                raise ConfigError(f"{where} {trouble}") from None
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise ConfigError(f"{where} refuses this gateway: {error.details()}") from None
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise ConfigError(
                f"the service at {self._address} is no {self._service} of this release ({error.details()}); name it "
                "as what it is, or start the same release there"
            ) from None
