"""The gRPC service of the target: handshake information, the tokenizer's files, control, and the session stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

import outrider
from outrider.checkpoints import checkpoint
from outrider.config import TargetConfig
from outrider.errors import InvalidRequest, Unavailable
from outrider.serving.loop import EngineLoop
from outrider.transport.rpc import GrpcServer
from outrider.transport.statuses import statuses, with_status
from outrider.transport.stream import StreamHub
from outrider.transport.uploads import answers_upload
from outrider.wire.features import feature_spec_from_pb
from outrider.wire.opens import source_to_pb
from outrider.wire.v1 import common_pb2, target_pb2, target_pb2_grpc

if TYPE_CHECKING:  # PyTorch is not needed to answer
    from services.target.engine.engine import TargetEngine
    from services.target.process.control import Control, Update, Weights

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "config.json",
)
"""The files of a model's folder that the gateway needs beside its chat templates."""

_PART_BYTES = 1 << 20
_PAUSE_MODES = {
    common_pb2.PAUSE_MODE_UNSPECIFIED: "abort",
    common_pb2.PAUSE_MODE_ABORT: "abort",
    common_pb2.PAUSE_MODE_RETRACT: "retract",
    common_pb2.PAUSE_MODE_IN_PLACE: "in_place",
}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Facts:
    """The handshake information of a loaded target."""

    folder: Path
    info: target_pb2.GetTargetInfoResponse


def describe(folder: Path, engine: TargetEngine, config: TargetConfig) -> Facts:
    """The handshake information of a loaded model. Reads the folder's weight headers and tokenizer."""
    model, fingerprint = engine.model, checkpoint.fingerprint(folder)
    info = target_pb2.GetTargetInfoResponse(
        protocol_version=outrider.PROTOCOL_VERSION,
        software_version=outrider.__version__,
        model=common_pb2.ModelInfo(
            model_path=checkpoint.display_name(config.model_path),
            fingerprint=fingerprint,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            vocab_hash=checkpoint.vocab_hash(folder),
            context_length=model.context_length,
            dtype=str(model.dtype).removeprefix("torch."),
        ),
        eos_token_ids=model.eos_token_ids,
        max_session_tokens=engine.sessions.longest,
        max_running_sessions=config.max_running_requests,
        max_draft_tokens=engine.speculation.planner.max_tokens,
        page_size=config.page_size,
        ranks=config.tp_size,
        weight_version=engine.weight_version,
        kv_cache_dtype=str(model.cache_dtype).removeprefix("torch."),
        first_fingerprint=fingerprint,
        draft_sources=[source_to_pb(source) for source in sorted(engine.speculation.allowed.own)],
        weight_formats=model.kinds,
        step_weight_megabytes=round(model.step_bytes / 1e6),
        quantization=config.quantization or "",
    )
    return Facts(folder, info)


def _most_fusion_bytes(hidden_size: int, spec: common_pb2.FeatureSpec | None) -> int:
    """Size that no fusion exceeds: that of a drafter 16 times as wide as the model, in float32, and a header."""
    states = 1 + (len(spec.layers) if spec is not None else 0)
    return (1 << 20) + 64 * states * hidden_size**2


def update_from_pb(message: common_pb2.WeightUpdate) -> Update:
    """The options of a weight update."""
    from services.target.process.control import Update

    version = message.weight_version if message.HasField("weight_version") else None
    return Update(version, message.keep_cache, message.abort_all_requests, tuple(message.shared_tensors))


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """TargetService around an engine's streams. Calls before `serve` get UNAVAILABLE."""

    def __init__(self, hub: StreamHub[Any, Any], loop: EngineLoop) -> None:
        self._hub = hub
        self._loop = loop
        self._engine: TargetEngine | None = None
        self._control: Control | None = None
        self.facts: Facts | None = None
        self._folder: Path | None = None

    def offer_tokenizer(self, folder: Path) -> None:
        """Answer calls for the tokenizer's files, while the model is being loaded from the folder."""
        self._folder = folder

    def serve(self, facts: Facts, engine: TargetEngine, control: Control) -> None:
        """Start answering, now that the model is loaded."""
        facts.info.max_update_bytes = control.max_update_bytes
        self.facts, self._engine, self._control = facts, engine, control
        self._folder = facts.folder

    def register(self, server: GrpcServer) -> tuple[str, ...]:
        """Add the service to a server. Returns its full name."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server.server)
        return (SERVICE_NAME,)

    def _loaded(self) -> Facts:
        if self.facts is None:
            raise Unavailable("the target is loading its model; retry in a moment", retry_after=1)
        return self.facts

    def _running(self) -> tuple[TargetEngine, Control]:
        self._loaded()
        assert self._engine is not None, "facts and engine come together"
        assert self._control is not None, "engine and control come together"
        return self._engine, self._control

    async def _in_engine(self, work: Callable[[], Result]) -> Result:
        """Run work in the engine thread between two steps, and return its result."""
        return await asyncio.wrap_future(self._loop.call(work))

    @with_status
    async def GetTargetInfo(
        self, request: target_pb2.GetTargetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.GetTargetInfoResponse:
        """Information for the handshake."""
        return self._loaded().info

    async def GetTokenizer(
        self, request: target_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        """The tokenizer's existing files, in parts."""
        async with statuses(context):
            if (folder := self._folder) is None:
                folder = self._loaded().folder
            for name in (*TOKENIZER_FILES, *checkpoint.chat_template_files(folder)):
                path = folder / name
                if not path.is_file():
                    continue
                content = await asyncio.to_thread(path.read_bytes)
                for start in range(0, len(content), _PART_BYTES):
                    part = content[start : start + _PART_BYTES]
                    yield target_pb2.GetTokenizerResponse(file_name=name, content=part)

    @answers_upload
    async def ConfigureFeatures(
        self,
        request_iterator: AsyncIterator[target_pb2.ConfigureFeaturesRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> target_pb2.ConfigureFeaturesResponse:
        """Register a specification of hidden states that sessions may request."""
        engine, _ = self._running()
        spec: common_pb2.FeatureSpec | None = None
        fusion = bytearray()
        async for part in request_iterator:
            spec = part.spec if part.HasField("spec") else spec
            fusion += part.fusion
            if len(fusion) > _most_fusion_bytes(engine.model.hidden_size, spec):
                raise InvalidRequest("the fusion is larger than any drafter's for this model", param="fusion")
        if spec is None:
            raise InvalidRequest("the first message must have the specification", param="spec")
        wanted, name, content = feature_spec_from_pb(spec), spec.spec_id, bytes(fusion)
        made = await asyncio.wrap_future(self._loop.call(lambda: engine.configure_features(name, wanted, content)))
        return target_pb2.ConfigureFeaturesResponse(layers=made.layers, width=made.width, row_bytes=made.row_bytes)

    @with_status
    async def UpdateWeightsFromDisk(
        self, request: target_pb2.UpdateWeightsFromDiskRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.UpdateWeightsFromDiskResponse:
        """Replace all weights by those of a folder."""
        from services.target.process.control import Condition

        _, control = self._running()
        condition = Condition(request.fingerprint, request.replaced_fingerprint)
        folder = await asyncio.to_thread(control.read_folder, request.folder, condition)
        update = update_from_pb(request.update)
        facts = await self._in_engine(lambda: self._changed(control.update_from_folder(folder, update, condition)))
        return target_pb2.UpdateWeightsFromDiskResponse(weights=facts)

    @answers_upload
    async def UpdateWeightsFromTensor(
        self,
        request_iterator: AsyncIterator[target_pb2.UpdateWeightsFromTensorRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> target_pb2.UpdateWeightsFromTensorResponse:
        """Replace weights by tensors that come in parts."""
        _, control = self._running()
        parts = aiter(request_iterator)
        first = await anext(parts, target_pb2.UpdateWeightsFromTensorRequest())
        update = update_from_pb(first.update)
        with control.incoming(pickled=first.format == target_pb2.TENSOR_FORMAT_PICKLE) as incoming:
            incoming.add(first.content)
            async for part in parts:
                incoming.add(part.content)
            await asyncio.to_thread(incoming.finish)
            await asyncio.to_thread(control.check_numbers, incoming)
            facts = await self._in_engine(lambda: self._changed(control.update_from_tensors(incoming, update)))
        return target_pb2.UpdateWeightsFromTensorResponse(weights=facts)

    @with_status
    async def JoinWeightsGroup(
        self, request: target_pb2.JoinWeightsGroupRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.JoinWeightsGroupResponse:
        """Take a place in a trainer's process group."""
        from services.target.process.weights.member import Membership

        groups = self._running()[1].groups
        place = (request.address, request.port, request.rank, request.world_size, request.backend)
        membership = Membership(request.group_name, *place)
        await self._in_engine(lambda: groups.announce("join", membership=asdict(membership)))
        await asyncio.wrap_future(groups.join(membership))
        return target_pb2.JoinWeightsGroupResponse()

    @with_status
    async def LeaveWeightsGroup(
        self, request: target_pb2.LeaveWeightsGroupRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.LeaveWeightsGroupResponse:
        """Leave a trainer's process group."""
        groups, name = self._running()[1].groups, request.group_name
        await self._in_engine(lambda: groups.announce("leave", name=name))
        await asyncio.wrap_future(groups.leave(name))
        return target_pb2.LeaveWeightsGroupResponse()

    @with_status
    async def UpdateWeightsFromGroup(
        self, request: target_pb2.UpdateWeightsFromGroupRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.UpdateWeightsFromGroupResponse:
        """Replace weights by tensors that a trainer broadcasts."""
        from services.target.process.weights.group import Announced

        _, control = self._running()
        name, flattened = request.group_name, request.flattened
        announced = [Announced(one.name, one.dtype, tuple(one.shape)) for one in request.tensors]
        tensors = [(one.name, one.dtype, one.shape) for one in announced]
        update, groups = update_from_pb(request.update), control.groups
        with control.exclusively():
            groups.check(announced)
            await self._in_engine(lambda: groups.announce("receive", name=name, announced=tensors, flattened=flattened))
            arrived = await asyncio.wrap_future(groups.receive(name, announced, flattened=flattened))
            await asyncio.to_thread(control.check_numbers, arrived)
            facts = await self._in_engine(lambda: self._changed(control.update_from_tensors(arrived, update)))
        return target_pb2.UpdateWeightsFromGroupResponse(weights=facts)

    def _changed(self, weights: Weights) -> common_pb2.WeightFacts:
        """In the engine thread, because the caller may have disconnected: record the new weights, and return them."""
        info = self._loaded().info
        info.weight_version, info.model.fingerprint = weights.weight_version, weights.fingerprint
        info.weights_folder, info.shared_fingerprint = weights.folder, self._running()[1].shared.fingerprint
        return common_pb2.WeightFacts(
            weight_version=weights.weight_version,
            fingerprint=weights.fingerprint,
            replaced_tensors=weights.replaced,
            aborted_sessions=weights.aborted,
            retracted_sessions=weights.retracted,
            fingerprint_before=weights.before,
            whole=weights.whole,
            folder=weights.folder,
            shared_fingerprint=info.shared_fingerprint,
        )

    async def GetSharedWeights(
        self, request: target_pb2.GetSharedWeightsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[target_pb2.GetSharedWeightsResponse]:
        """Present weights for drafts, tensor by tensor."""
        async with statuses(context):
            from services.target.process.weights.shared import header_of, parts_of

            shared = self._running()[1].shared
            fingerprint, found = await self._in_engine(lambda: (shared.fingerprint, shared.find(request.names)))
            yield target_pb2.GetSharedWeightsResponse(fingerprint=fingerprint, content=header_of(found))
            for one in found.values():
                for part in parts_of(await asyncio.to_thread(one.read)):
                    yield target_pb2.GetSharedWeightsResponse(content=part)

    @with_status
    async def FlushCache(
        self, request: target_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.FlushCacheResponse:
        """Drop cached prefixes."""
        await self._in_engine(self._running()[1].flush_cache)
        return target_pb2.FlushCacheResponse()

    @with_status
    async def PauseGeneration(
        self, request: target_pb2.PauseGenerationRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.PauseGenerationResponse:
        """Stop taking steps."""
        _, control = self._running()
        mode = _PAUSE_MODES.get(request.mode)
        if mode is None:
            raise InvalidRequest(f"pause mode {request.mode} is not known here", param="mode")
        aborted = await self._in_engine(lambda: control.pause(mode))
        return target_pb2.PauseGenerationResponse(aborted_sessions=aborted)

    @with_status
    async def ContinueGeneration(
        self, request: target_pb2.ContinueGenerationRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.ContinueGenerationResponse:
        """Take steps again."""
        await self._in_engine(self._running()[1].proceed)
        return target_pb2.ContinueGenerationResponse()

    @with_status
    async def ReleaseMemory(
        self, request: target_pb2.ReleaseMemoryRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.ReleaseMemoryResponse:
        """Return the memory of the KV cache to the system."""
        size = await self._in_engine(self._running()[1].release)
        return target_pb2.ReleaseMemoryResponse(released_bytes=size)

    @with_status
    async def ResumeMemory(
        self, request: target_pb2.ResumeMemoryRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.ResumeMemoryResponse:
        """Take memory again."""
        await self._in_engine(self._running()[1].resume)
        return target_pb2.ResumeMemoryResponse()

    async def Verify(
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """One gateway's stream of sessions."""
        del request_iterator  # frames are read and written through the context
        async with statuses(context):
            self._loaded()
            await self._hub.answer(context, target_pb2.VerifyRequest)
