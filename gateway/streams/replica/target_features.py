"""The hidden states that drafts need of a target: registered there at each handshake."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc

from gateway.streams.features import FUSION_TIMEOUT, Features
from outrider.errors import ConfigError
from outrider.transport.uploads import upload
from outrider.wire.v1 import target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)


class TargetFeatures:
    """Outlives the target's process.

    known: ids of the FeatureSpecs that the target knows. wanted: what drafts need, by id
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self.known: set[int] = set()
        self.wanted: dict[int, Features] = {}

    def add(self, features: Features) -> None:
        """A draft needs these; they are registered at the next handshake."""
        self.wanted[features.spec.spec_id] = features

    def keep(self, needed: Collection[int]) -> None:
        """Drop the specifications that no draft needs any more. needed: ids of the others."""
        for spec_id in self.wanted.keys() - needed:
            del self.wanted[spec_id]
            self.known.discard(spec_id)

    async def configure_all(self, channel: grpc.aio.Channel) -> None:
        """Register what drafts need at a target that may have restarted."""
        self.known.clear()
        for features in list(self.wanted.values()):  # a copy: a draft that connects meanwhile registers its own
            try:
                await self.configure(channel, features)
            except ConfigError as error:
                log.warning("%s; its sessions get no hidden states", error.message)

    async def configure(self, channel: grpc.aio.Channel, features: Features) -> None:
        """Register hidden states. Raises ConfigError if they are refused."""
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)

        async def parts() -> AsyncIterator[target_pb2.ConfigureFeaturesRequest]:
            yield target_pb2.ConfigureFeaturesRequest(spec=features.spec)
            for part in features.fusion:
                yield target_pb2.ConfigureFeaturesRequest(fusion=part)

        try:
            await upload(stub.ConfigureFeatures, parts(), FUSION_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
            raise ConfigError(f"the target at {self._address} cannot serve the drafter: {error.details()}") from None
        self.known.add(features.spec.spec_id)
