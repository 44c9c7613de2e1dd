"""The link to a target replica."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import grpc

from gateway.streams.availability import Availability, ReplicaState
from gateway.streams.connection import PLAIN, Connection
from gateway.streams.features import Features
from gateway.streams.frames import cut_opens, join
from gateway.streams.link import CALL_TIMEOUT, Link, check_version
from gateway.streams.pool_weights import OtherWeights, PoolWeights
from gateway.streams.replica.frame_stream import StreamType
from gateway.streams.replica.target_features import TargetFeatures
from gateway.streams.replica.tokenizer_files import TokenizerFiles
from outrider.errors import ConfigError
from outrider.wire.arrays import U64, pack
from outrider.wire.v1 import common_pb2, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

UpdateLock = Callable[[], contextlib.AbstractAsyncContextManager[Any]]

_LOAD_WAIT = 15.0  # seconds between attempts to load weights that could not be loaded
_LOAD_TIMEOUT = 3600.0  # seconds for a target to read all weights


class TargetLink(Link[target_pb2.GetTargetInfoResponse, target_pb2.VerifyResponse]):
    """Sends opens, proposals and closes; receives commits. Replicas of a pool must serve the same checkpoint.

    update_lock: excludes updates of weights
    paused: what the target must be set to before it is used again: True to pause, False to continue, None for nothing.
        It may have restarted, or have lost no more than its stream.
    flush_due: its cached prefixes are dropped before it is used
    model_path: the checkpoint that it must serve; empty for any
    """

    service = "target"
    stream_type = StreamType(
        "/outrider.wire.v1.TargetService/Verify", target_pb2.VerifyResponse, features_are="received"
    )

    def __init__(self, address: str, connection: Connection = PLAIN) -> None:
        super().__init__(address, connection)
        self.tokenizer = TokenizerFiles()
        self.features = TargetFeatures(address)
        self._pool: PoolWeights | None = None
        self._load_error = ""  # of the last weights that the target could not load
        self.update_lock: UpdateLock = contextlib.nullcontext
        self.paused: bool | None = None
        self._pause_reported = False  # by the target, since `set_paused`
        self.flush_due = False
        self.model_path = ""
        self.clear()

    def clear(self) -> None:
        """As in Link."""
        self._opens: list[common_pb2.OpenSession] = []
        self._proposals: list[common_pb2.ProposalBatch] = []
        self._closes: list[int] = []

    def expect(self, weights: PoolWeights) -> None:
        """Refuse a target whose texts would differ. Raises ConfigError if they differ now, unless an update helps.

        weights: of the pool, which its targets share
        """
        self._pool = weights
        if self.info is None:
            return
        try:
            self._pool.check(self.address, self.info)
        except OtherWeights:
            self.reconnect()

    def expects(self, fingerprint: str) -> bool:
        """True if the target must have weights of this fingerprint to be used."""
        return self._pool is not None and self._pool.fingerprint == fingerprint

    @property
    def awaited_version(self) -> str | None:
        """Label of the weights that the target lacks and cannot load by itself; None if it is not refused for that."""
        awaits = self._pool is not None and self.availability.state is ReplicaState.AWAITING_WEIGHTS
        return self._pool.version if awaits and self._pool is not None else None

    @property
    def weight_version(self) -> str:
        """Label of the weights that the target must serve; empty before the first handshake."""
        return self._pool.version if self._pool is not None else self.info.weight_version if self.info else ""

    def weights_changed(self, fingerprint: str, version: str, folder: str = "", *, here: bool = True) -> None:
        """The served weights have this fingerprint and label now. here: False if this target does not have them yet.

        folder: that they came from; empty for tensors
        """
        assert self._pool is not None, "weights change only after the first handshake"
        self._pool.changed(fingerprint, version, folder)
        self._load_error = ""
        if here and self.up and self.info is not None:
            self.info.model.fingerprint, self.info.weight_version = fingerprint, version
        else:  # a target that has just got them is used at once
            self.reconnect()

    def state_after(self, error: ConfigError) -> ReplicaState:
        """As in Link."""
        return error.state if isinstance(error, OtherWeights) else ReplicaState.REFUSED

    def set_paused(self, paused: bool) -> None:
        """Set whether the target is paused before it is used again, because a client asked for it."""
        self.paused, self._pause_reported = paused, False

    def update_load(self, report: common_pb2.EngineLoad) -> None:
        """Take the engine's report. Its pause holds even if another gateway asked for it.

        A report that is older than the pause does not end it: until one shows the pause, it is kept.
        """
        super().update_load(report)
        if report.paused:
            self.paused = self._pause_reported = True
        elif self._pause_reported or not self.paused:
            self.paused = None

    def open(self, request: common_pb2.OpenSession) -> None:
        """Open a session. A frame applies closes after opens, so an earlier close of this session is dropped."""
        if request.session_id in self._closes:
            self._closes.remove(request.session_id)
        self._opens.append(request)
        self.stream.outgoing.set()

    def propose(self, batch: common_pb2.ProposalBatch) -> None:
        """Relay proposals."""
        self._proposals.append(batch)
        self.stream.outgoing.set()

    def close(self, session_id: int) -> None:
        """Close a session."""
        self._closes.append(session_id)
        self.stream.outgoing.set()

    def take_frame(self) -> target_pb2.VerifyRequest:
        """As in Link."""
        opens, later = cut_opens(self._opens)
        if later:  # all other messages refer to open sessions
            self._opens = later
            self.stream.outgoing.set()
            return target_pb2.VerifyRequest(opens=opens)
        frame = target_pb2.VerifyRequest(opens=opens, proposals=join(self._proposals), closes=pack(self._closes, U64))
        self.clear()
        return frame

    async def handshake(self, channel: grpc.aio.Channel) -> target_pb2.GetTargetInfoResponse:
        """As in Link."""
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        try:
            info: target_pb2.GetTargetInfoResponse = await stub.GetTargetInfo(
                target_pb2.GetTargetInfoRequest(), timeout=CALL_TIMEOUT
            )
        except grpc.aio.AioRpcError:
            await self.tokenizer.fetch_early(stub)
            raise
        check_version(self.service, self.address, info.protocol_version)
        if self.model_path not in ("", info.model.model_path):
            raise ConfigError(
                f"the target at {self.address} serves {info.model.model_path}; its pool is for {self.model_path} "
                "(--model-path); is it the address of another model's target?"
            )
        await self.tokenizer.fetch(stub)
        if self._pool is not None:
            try:
                self._pool.check(self.address, info)
            except OtherWeights:
                info = await self._load_weights(stub, self._pool)
        await self.features.configure_all(channel)
        return info

    async def _load_weights(self, stub: Any, pool: PoolWeights) -> target_pb2.GetTargetInfoResponse:
        """Let a target load the weights that it lacks. Returns its facts. Raises OtherWeights if it cannot."""
        async with self.update_lock():  # an update to these weights or others may be under way
            info: target_pb2.GetTargetInfoResponse = await stub.GetTargetInfo(
                target_pb2.GetTargetInfoRequest(), timeout=CALL_TIMEOUT
            )
            try:
                pool.check(self.address, info)
            except OtherWeights:
                request = pool.request_for(info)
                if request is None:
                    raise
                await self._load_from_folder(stub, pool, info, request)
                info = await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest(), timeout=CALL_TIMEOUT)
        pool.check(self.address, info)
        return info

    async def _load_from_folder(
        self,
        stub: Any,
        pool: PoolWeights,
        info: target_pb2.GetTargetInfoResponse,
        request: target_pb2.UpdateWeightsFromDiskRequest,
    ) -> None:
        if not self._load_error:
            loading = f'it loads the weights "{pool.version}" of the last update'
            self.absence.set(Availability(ReplicaState.STARTING, loading))
        try:
            await stub.UpdateWeightsFromDisk(request, timeout=_LOAD_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
            # Paths stay in the log: /health shows the reason to every client.
            reason = f'the weights "{pool.version}" cannot be loaded from {request.folder}: {error.details()}'
            if reason != self._load_error:
                log.warning("the target at %s: %s", self.address, reason)
            self._load_error, self.longest_refused_wait = reason, _LOAD_WAIT
            why = ", which it cannot load from the folder that they came from (the gateway's log has the reason)"
            raise pool.awaited(self.address, info, why) from None
        self._load_error, self.longest_refused_wait = "", Link.longest_refused_wait
        log.info('the target at %s has loaded the weights "%s" from %s', self.address, pool.version, request.folder)

    async def prepare(self, channel: grpc.aio.Channel) -> None:
        """Flush the target if due. Pause it, or let it continue; again if the wanted state changes meanwhile."""
        if self.flush_due:
            await self._flush(channel)
        done: bool | None = None
        while (paused := self.paused) is not None and paused is not done:
            stub: Any = target_pb2_grpc.TargetServiceStub(channel)
            if paused:  # in place: sessions of other gateways may be running there
                request = target_pb2.PauseGenerationRequest(mode=common_pb2.PAUSE_MODE_IN_PLACE)
                await stub.PauseGeneration(request, timeout=CALL_TIMEOUT)
            else:
                await stub.ContinueGeneration(target_pb2.ContinueGenerationRequest(), timeout=CALL_TIMEOUT)
            done = paused

    async def _flush(self, channel: grpc.aio.Channel) -> None:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        try:
            await stub.FlushCache(target_pb2.FlushCacheRequest(), timeout=CALL_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            log.warning("the target at %s keeps its cached prefixes: %s", self.address, error.details())
        self.flush_due = False

    async def configure(self, features: Features) -> None:
        """Register hidden states that a draft needs, now or at the next handshake. Raises ConfigError if refused."""
        self.features.add(features)
        if self.channel is None:
            return
        try:
            await self.features.configure(self.channel, features)
        except grpc.aio.AioRpcError:
            if self.up:
                raise  # otherwise the next handshake does it
