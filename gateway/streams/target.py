"""The link to a target replica."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc

from gateway.streams.batches import cut_opens, join
from gateway.streams.features import FUSION_TIMEOUT, Features
from gateway.streams.link import CALL_TIMEOUT, Link, Metadata, collect_files
from outrider.errors import ConfigError
from outrider.speculation.proposal import Logprobs
from outrider.tls import ClientTls
from outrider.wire import codec
from outrider.wire.arrays import U64, pack
from outrider.wire.v1 import common_pb2, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)


class OtherWeights(ConfigError):
    """A target fits but for an update of its weights that it has missed, or that others have."""


class TargetLink(Link[target_pb2.GetTargetInfoResponse, target_pb2.VerifyResponse]):
    """Opens, proposals and closes go out; commits come in. Replicas of a pool must serve the same checkpoint."""

    service = "target"
    frame = target_pb2.VerifyResponse

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        super().__init__(address, tls)
        self.tokenizer_files: dict[str, bytes] = {}
        self.features: set[int] = set()  # ids of the specifications that it knows
        self._wanted: dict[int, Features] = {}
        self._expected: target_pb2.GetTargetInfoResponse | None = None
        # What it is told before it is used again: True to pause, False to go on, None for nothing. It may have been
        # started anew, or have lost no more than its stream.
        self.paused: bool | None = None
        self._clear()

    def _clear(self) -> None:
        self._opens: list[common_pb2.OpenSession] = []
        self._proposals: list[common_pb2.ProposalBatch] = []
        self._closes: list[int] = []

    def expect(self, facts: target_pb2.GetTargetInfoResponse) -> None:
        """Refuse what would give other texts from now on. Raises ConfigError if it is such a one already, unless an
        update can mend it.
        """
        self._expected = target_pb2.GetTargetInfoResponse.FromString(facts.SerializeToString())
        if self.info is None:
            return
        try:
            self._check(self.info)
        except OtherWeights:
            self.shake_hands_again()

    def expects(self, fingerprint: str) -> bool:
        """True if weights of this fingerprint are those that it must have to be used."""
        return self._expected is not None and self._expected.model.fingerprint == fingerprint

    def weights_changed(self, fingerprint: str, version: str, *, here: bool = True) -> None:
        """It has weights of this fingerprint and label now. here: False if it must get them before it is used again."""
        assert self._expected is not None, "weights change only once a target has been met"
        self._expected.model.fingerprint = fingerprint
        if not here:
            self.shake_hands_again()
        elif self.info is not None:
            self.info.model.fingerprint, self.info.weight_version = fingerprint, version

    def _check(self, facts: target_pb2.GetTargetInfoResponse) -> None:
        """Raise ConfigError for another model than the expected one, other number formats, or other weights."""
        expected = self._expected
        if expected is None:
            return
        model, served = facts.model, expected.model
        first, others = facts.first_fingerprint, expected.first_fingerprint
        updated = first != "" and first == others  # began as the same
        if model.fingerprint != served.fingerprint and not updated:
            raise ConfigError(
                self._serves(facts) + "restart the gateway to change the model, or update the target's weights"
            )
        for flag, own, others in (
            ("--dtype", model.dtype, served.dtype),
            ("--kv-cache-dtype", facts.kv_cache_dtype, expected.kv_cache_dtype),
        ):
            if own != others:
                raise ConfigError(
                    f"the target at {self.address} computes with {flag} {own}, the others of its pool with {others}; "
                    "sessions may move between them, so give all the same"
                )
        if model.fingerprint != served.fingerprint:
            raise OtherWeights(self._serves(facts) + "update the target's weights")

    def _serves(self, facts: target_pb2.GetTargetInfoResponse) -> str:
        assert self._expected is not None, "it is compared with what is expected"
        model, served = facts.model, self._expected.model
        return (
            f"the target at {self.address} serves {model.model_path}, fingerprint {model.fingerprint}; the model "
            f"that this gateway serves is {served.model_path}, fingerprint {served.fingerprint}; "
        )

    def heard(self, load: common_pb2.EngineLoad) -> None:
        """Its engine tells how it is; it is believed also where another gateway was asked to pause it or to go on."""
        self.load = load
        self.paused = load.paused or None

    def open(self, request: common_pb2.OpenSession) -> None:
        """Open a session. In a frame closes come behind opens; one that was said of it before would end it."""
        if request.session_id in self._closes:
            self._closes.remove(request.session_id)
        self._opens.append(request)
        self.wake()

    def propose(self, batch: common_pb2.ProposalBatch) -> None:
        """Pass hints on."""
        self._proposals.append(batch)
        self.wake()

    def close(self, session_id: int) -> None:
        """Close a session."""
        self._closes.append(session_id)
        self.wake()

    def _take(self) -> target_pb2.VerifyRequest:
        opens, later = cut_opens(self._opens)
        if later:  # all else is said of sessions that are open
            self._opens = later
            self.wake()
            return target_pb2.VerifyRequest(opens=opens)
        frame = target_pb2.VerifyRequest(opens=opens, proposals=join(self._proposals), closes=pack(self._closes, U64))
        self._clear()
        return frame

    async def _handshake(self, channel: grpc.aio.Channel) -> target_pb2.GetTargetInfoResponse:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        info: target_pb2.GetTargetInfoResponse = await stub.GetTargetInfo(
            target_pb2.GetTargetInfoRequest(), timeout=CALL_TIMEOUT
        )
        self._check_version(info.protocol_version)
        if not self.tokenizer_files:
            parts = stub.GetTokenizer(target_pb2.GetTokenizerRequest(), timeout=CALL_TIMEOUT)
            self.tokenizer_files = await collect_files(parts)
        self._check(info)
        await self._configure_all(channel)
        return info

    async def _prepare(self, channel: grpc.aio.Channel) -> None:
        told: bool | None = None
        while (paused := self.paused) is not None and paused is not told:
            stub: Any = target_pb2_grpc.TargetServiceStub(channel)
            if paused:  # nobody ends, for those who wait there may be another gateway's
                request = target_pb2.PauseGenerationRequest(mode=common_pb2.PAUSE_MODE_IN_PLACE)
                await stub.PauseGeneration(request, timeout=CALL_TIMEOUT)
            else:
                await stub.ContinueGeneration(target_pb2.ContinueGenerationRequest(), timeout=CALL_TIMEOUT)
            told = paused

    async def configure(self, features: Features) -> None:
        """Let it know what a draft's sessions will ask for, now or once it is up. Raises ConfigError if it refuses."""
        self._wanted[features.spec.spec_id] = features
        if self.channel is None:
            return
        try:
            await self._configure(self.channel, features)
        except grpc.aio.AioRpcError:
            if self.up:
                raise  # otherwise the handshake will do it

    def configure_no_more(self, wanted: Collection[int]) -> None:
        """Forget what no draft feeds on any more. wanted: ids of what they do."""
        for spec_id in self._wanted.keys() - wanted:
            del self._wanted[spec_id]
            self.features.discard(spec_id)

    async def _configure_all(self, channel: grpc.aio.Channel) -> None:
        self.features.clear()  # it may have been started anew
        for features in list(self._wanted.values()):  # a draft that comes meanwhile brings its own
            try:
                await self._configure(channel, features)
            except ConfigError as error:
                log.warning("%s; its sessions go without features", error.message)

    async def _configure(self, channel: grpc.aio.Channel, features: Features) -> None:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)

        async def parts() -> AsyncIterator[target_pb2.ConfigureFeaturesRequest]:
            yield target_pb2.ConfigureFeaturesRequest(spec=features.spec)
            for part in features.fusion:
                yield target_pb2.ConfigureFeaturesRequest(fusion=part)

        try:
            await stub.ConfigureFeatures(parts(), timeout=FUSION_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
            raise ConfigError(f"the target at {self.address} cannot serve the drafter: {error.details()}") from None
        self.features.add(features.spec.spec_id)

    def _open_stream(self, channel: grpc.aio.Channel, metadata: Metadata) -> Any:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        return stub.Verify(metadata=metadata)


def logprobs_of(frame: target_pb2.VerifyResponse) -> dict[int, list[Logprobs]]:
    """Log-probabilities in a frame, by the place of their commit. Raises InvalidRequest."""
    groups: dict[int, list[Logprobs]] = {}
    if frame.HasField("logprobs"):
        for place, group in codec.logprobs_from_pb(frame.logprobs):
            groups.setdefault(place, []).append(group)
    return groups
