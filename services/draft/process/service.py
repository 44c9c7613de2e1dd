"""The gRPC service of the draft: facts for the handshake, and the stream of sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.serving.loop import EngineLoop
from outrider.transport.rpc import GrpcServer
from outrider.transport.statuses import statuses, with_status
from outrider.transport.stream import StreamHub
from outrider.transport.uploads import answers_upload
from outrider.wire.v1 import draft_pb2, draft_pb2_grpc
from services.draft.drafters.shared_weights import ArrivingTensors, LoadedWeights, SharedWeights
from services.draft.engine.engine import DraftEngine

log = logging.getLogger(__name__)

_PART_BYTES = 1 << 20
SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """DraftService around an engine's streams.

    Until `serve` is called, calls fail with Unavailable, or with ConfigError once the draft could not be loaded.
    """

    def __init__(self, hub: StreamHub[Any, Any], loop: EngineLoop) -> None:
        self._hub = hub
        self._loop = loop
        self._engine: DraftEngine | None = None
        self._info: draft_pb2.GetDraftInfoResponse | None = None
        self._failure: str | None = None
        self._refreshing = asyncio.Lock()

    def serve(self, info: draft_pb2.GetDraftInfoResponse, engine: DraftEngine) -> None:
        """Begin to serve: the drafters are built and warmed up."""
        self._info, self._engine = info, engine

    def failed(self, reason: str) -> None:
        """The drafters could not be loaded, and will be tried again. Any thread may call."""
        self._failure = reason

    def register(self, server: GrpcServer) -> tuple[str, ...]:
        """Add the service to a server. Returns its full name."""
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server.server)
        return (SERVICE_NAME,)

    def _built(self) -> tuple[draft_pb2.GetDraftInfoResponse, DraftEngine]:
        if self._info is None or self._engine is None:
            if self._failure is not None:
                raise ConfigError(f"the draft cannot be loaded: {self._failure}")
            raise Unavailable("the draft service is starting up; retry in a moment", retry_after=1)
        return self._info, self._engine

    @with_status
    async def GetDraftInfo(
        self, request: draft_pb2.GetDraftInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.GetDraftInfoResponse:
        """Facts for the handshake."""
        return self._built()[0]

    async def GetFusion(
        self, request: draft_pb2.GetFusionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[draft_pb2.GetFusionResponse]:
        """The fusion layer that the target applies, in parts."""
        async with statuses(context):
            fusion = self._built()[1].drafter.fusion
            for start in range(0, len(fusion), _PART_BYTES):
                yield draft_pb2.GetFusionResponse(content=fusion[start : start + _PART_BYTES])

    @with_status
    async def FlushDraft(
        self, request: draft_pb2.FlushDraftRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.FlushDraftResponse:
        """Drop what drafters keep of texts, or only of the target's hidden states, between two steps."""
        _, engine = self._built()
        if not request.weights_only:
            await asyncio.wrap_future(self._loop.call(partial(engine.flush, only_fed=request.only_fed)))
        wants = False
        if engine.drafter.shared_weights is not None:
            wants = await self._load_weights(engine.drafter.shared_weights, request)
        return draft_pb2.FlushDraftResponse(wants_tensors=wants)

    async def _load_weights(self, shared: SharedWeights, request: draft_pb2.FlushDraftRequest) -> bool:
        """Load shared weights from a folder. Returns True if the draft needs them sent: a failure only costs speed."""
        folder, wanted = request.target_folder, request.shared_fingerprint
        if folder:
            async with self._refreshing:  # one at a time, so that the last request wins
                try:
                    weights = None
                    if not wanted or wanted != shared.fingerprint:
                        weights = await asyncio.to_thread(shared.load, folder, wanted)
                except Exception as error:
                    reason = error.message if isinstance(error, OutriderError) else error
                    log.log(
                        logging.INFO if wanted else logging.WARNING,
                        "the draft keeps the target's old weights: %s", reason,
                    )  # fmt: skip
                else:
                    await self._install(shared, weights, f"the folder {folder}")
        return wanted not in ("", shared.fingerprint)

    async def _install(self, shared: SharedWeights, weights: LoadedWeights | None, source: str) -> None:
        if weights is not None:
            await asyncio.wrap_future(self._loop.call(partial(shared.install, weights)))
            log.info("the draft has the target's new weights, from %s", source)

    @answers_upload
    async def UpdateSharedWeights(
        self,
        request_iterator: AsyncIterator[draft_pb2.UpdateSharedWeightsRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> draft_pb2.UpdateSharedWeightsResponse:
        """Replace weights that the draft shares with the target by tensors that come in parts."""
        shared = self._built()[1].drafter.shared_weights
        if shared is None:
            raise ConfigError("the draft shares no weights with its target")
        parts = aiter(request_iterator)
        first = await anext(parts, draft_pb2.UpdateSharedWeightsRequest())
        async with self._refreshing:  # another gateway may send the same
            if not first.fingerprint or first.fingerprint != shared.fingerprint:
                arriving = ArrivingTensors(shared.shapes)
                arriving.add(first.content)
                async for part in parts:
                    arriving.add(part.content)
                weights = await asyncio.to_thread(shared.take, arriving.finish(), first.fingerprint)
                await self._install(shared, weights, "the target")
        return draft_pb2.UpdateSharedWeightsResponse()

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """One gateway's stream of sessions."""
        del request_iterator  # frames are read and written through the context
        async with statuses(context):
            self._built()
            await self._hub.answer(context, draft_pb2.ProposeRequest)
