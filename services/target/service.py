"""The gRPC face of the target: facts for the handshake, the tokenizer's files, and the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

import outrider
from outrider import checkpoint
from outrider.config import TargetConfig
from outrider.errors import InvalidRequest, Unavailable
from outrider.serving.loop import EngineLoop
from outrider.serving.rpc import GrpcServer, statuses
from outrider.serving.stream import StreamHub
from outrider.wire.codec import feature_spec_from_pb
from outrider.wire.v1 import common_pb2, target_pb2, target_pb2_grpc

if TYPE_CHECKING:  # PyTorch is not needed to answer
    from services.target.engine import TargetEngine

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "config.json",
)
_PART_BYTES = 1 << 20


@dataclass(frozen=True)
class Facts:
    """What a loaded target says about itself."""

    folder: Path
    info: target_pb2.GetTargetInfoResponse


def describe(folder: Path, engine: TargetEngine, config: TargetConfig) -> Facts:
    """The facts of a loaded model. Reads the folder's weight headers and tokenizer."""
    model = engine.model
    info = target_pb2.GetTargetInfoResponse(
        protocol_version=outrider.PROTOCOL_VERSION,
        software_version=outrider.__version__,
        model=common_pb2.ModelInfo(
            model_path=checkpoint.display_name(config.model_path),
            fingerprint=checkpoint.fingerprint(folder),
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            vocab_hash=checkpoint.vocab_hash(folder),
            context_length=model.context_length,
            dtype=str(model.dtype).removeprefix("torch."),
        ),
        eos_token_ids=model.eos_token_ids,
        max_session_tokens=engine.max_session_tokens,
        max_running_sessions=config.max_running_requests,
        max_draft_tokens=engine.max_rows,
        page_size=config.page_size,
        kv_cache_dtype=str(model.cache_dtype).removeprefix("torch."),
    )
    return Facts(folder, info)


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """TargetService around an engine's streams. Until `serve` is called, callers are told to wait."""

    def __init__(self, hub: StreamHub[Any, Any], loop: EngineLoop) -> None:
        self._hub = hub
        self._loop = loop
        self._engine: TargetEngine | None = None
        self.facts: Facts | None = None

    def serve(self, facts: Facts, engine: TargetEngine) -> None:
        """The model is loaded."""
        self.facts, self._engine = facts, engine

    def register(self, server: GrpcServer) -> tuple[str, ...]:
        """Add the service to a server. Returns its full name."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server.server)
        return (SERVICE_NAME,)

    def _loaded(self) -> Facts:
        if self.facts is None:
            raise Unavailable("the target is loading its model; retry in a moment")
        return self.facts

    def _running(self) -> TargetEngine:
        self._loaded()
        assert self._engine is not None, "facts and engine come together"
        return self._engine

    async def GetTargetInfo(  # noqa: N802
        self, request: target_pb2.GetTargetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.GetTargetInfoResponse:
        """Facts for the handshake."""
        del request
        async with statuses(context):
            return self._loaded().info
        raise AssertionError("an aborted call does not go on")

    async def GetTokenizer(  # noqa: N802
        self, request: target_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        """The tokenizer's files that exist, in parts."""
        del request
        async with statuses(context):
            for name in TOKENIZER_FILES:
                path = self._loaded().folder / name
                if not path.is_file():
                    continue
                content = await asyncio.to_thread(path.read_bytes)
                for start in range(0, len(content), _PART_BYTES):
                    part = content[start : start + _PART_BYTES]
                    yield target_pb2.GetTokenizerResponse(file_name=name, content=part)

    async def ConfigureFeatures(  # noqa: N802
        self,
        request_iterator: AsyncIterator[target_pb2.ConfigureFeaturesRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> target_pb2.ConfigureFeaturesResponse:
        """Get to know which hidden states sessions may ask for."""
        async with statuses(context):
            engine = self._running()
            spec: common_pb2.FeatureSpec | None = None
            fusion = bytearray()
            async for part in request_iterator:
                spec = part.spec if part.HasField("spec") else spec
                fusion += part.fusion
            if spec is None:
                raise InvalidRequest("the first message must have the specification", param="spec")
            wanted, name, content = feature_spec_from_pb(spec), spec.spec_id, bytes(fusion)
            made = await asyncio.wrap_future(self._loop.call(lambda: engine.features.configure(name, wanted, content)))
            return target_pb2.ConfigureFeaturesResponse(layers=made.layers, width=made.width, row_bytes=made.row_bytes)
        raise AssertionError("an aborted call does not go on")

    async def Verify(  # noqa: N802
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        """One gateway's stream of sessions."""
        async with statuses(context):
            self._loaded()
            async for frame in self._hub.serve(request_iterator):
                yield frame
