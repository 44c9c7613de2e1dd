"""The gRPC face of the draft: facts for the handshake, and the stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from outrider.serving.rpc import GrpcServer, statuses
from outrider.serving.stream import StreamHub
from outrider.wire.v1 import draft_pb2, draft_pb2_grpc

SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """DraftService around an engine's streams."""

    def __init__(self, hub: StreamHub[Any, Any], info: draft_pb2.GetDraftInfoResponse) -> None:
        self._hub = hub
        self._info = info

    def register(self, server: GrpcServer) -> tuple[str, ...]:
        """Add the service to a server. Returns its full name."""
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server.server)
        return (SERVICE_NAME,)

    async def GetDraftInfo(  # noqa: N802
        self, request: draft_pb2.GetDraftInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> draft_pb2.GetDraftInfoResponse:
        """Facts for the handshake."""
        del request, context
        return self._info

    async def Propose(  # noqa: N802
        self,
        request_iterator: AsyncIterator[draft_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        """One gateway's stream of sessions."""
        async with statuses(context):
            async for frame in self._hub.serve(request_iterator):
                yield frame
