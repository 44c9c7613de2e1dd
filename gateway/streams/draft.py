"""The link to a draft replica, and whether its model fits the target's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from gateway.streams.batches import cut_opens, join
from gateway.streams.features import FUSION_TIMEOUT, Backlog, Features
from gateway.streams.link import CALL_TIMEOUT, Link, Metadata
from outrider.checkpoints.vocabulary import Vocabulary, check_same
from outrider.tls import ClientTls
from outrider.wire.arrays import U64, pack
from outrider.wire.v1 import common_pb2, draft_pb2, draft_pb2_grpc

_UNLIMITED = "NGRAM"
SHARE_TIMEOUT = 600.0  # seconds for a draft to read the target's embedding and head


async def _at_once() -> None:
    """Nothing needs to be done before the link is up."""


class DraftLink(Link[draft_pb2.GetDraftInfoResponse, draft_pb2.ProposeResponse]):
    """Opens, commits and closes go out; proposals come in."""

    service = "draft"
    frame = draft_pb2.ProposeResponse

    def __init__(self, address: str, target_model: common_pb2.ModelInfo, tls: ClientTls | None = None) -> None:
        """target_model: what the draft's model must fit."""
        super().__init__(address, tls)
        self._target_model = target_model
        self._awaited = True  # hints were wanted by the last commits
        self._owed: draft_pb2.FlushDraftRequest | None = None  # what it must forget before it is used again
        self.target_folder = ""  # of the target's weights, where they came from one since
        self.features: Features | None = None  # what it feeds on; None if it needs nothing of the target
        self.before_up: Callable[[], Awaitable[None]] = _at_once  # `features` are known; may raise ConfigError
        self._clear()

    def _clear(self) -> None:
        self._opens: list[common_pb2.OpenSession] = []
        self._commits: list[common_pb2.CommitBatch] = []
        self._closes: list[int] = []
        self._features = Backlog()

    @property
    def feature_spec(self) -> int:
        """Id of what it feeds on; 0 for nothing."""
        return self.features.spec.spec_id if self.features is not None else 0

    @property
    def kind(self) -> tuple[str, ...]:
        """Drafters and model; equal for replicas of one another."""
        info = self.info
        return (*info.drafters, info.model.fingerprint) if info is not None else ()

    def follows(self, length: int) -> bool:
        """True if its main drafter does so with sessions of that many tokens."""
        limit = self.info.max_session_tokens if self.info is not None else 0
        return not limit or length < limit

    def drafts_for(self, length: int) -> bool:
        """True if a drafter of its does for sessions of that many tokens: n-grams know no limit."""
        return self.follows(length) or (self.info is not None and _UNLIMITED in self.info.drafters)

    def open(self, request: common_pb2.OpenSession) -> None:
        """Open a session. What is said of it before is said first; what it was fed before is no part of it any more."""
        self._opens.append(request)
        self._features.leave_out(request.session_id)
        self._awaited |= not request.drafting_paused
        self._wake()

    def commit(self, batch: common_pb2.CommitBatch) -> None:
        """Pass commits on; where no hints are wanted, many in one frame."""
        self._commits.append(batch)
        if not all(batch.finish_reasons):  # the end of a session says nothing about the hints of others
            self._awaited = any(batch.draft_budgets)
        self._wake()

    def flush_later(self, request: draft_pb2.FlushDraftRequest) -> None:
        """Ask it to forget before it is used again: it may have lost no more than its stream."""
        if self._owed is None or self._owed.only_fed:
            self._owed = request

    def _wake(self) -> None:
        if self._awaited:
            self.wake()
        else:
            self.wake_later()

    def feed(self, batch: common_pb2.FeatureBatch) -> bool:
        """Pass hidden states on, behind the commits said so far. False if too many wait already."""
        taken = self._features.add(batch)
        self._wake()
        return taken

    def close(self, session_id: int) -> None:
        """Close a session."""
        self._closes.append(session_id)
        self.wake()

    def _take(self) -> draft_pb2.ProposeRequest:
        opens, later = cut_opens(self._opens)
        if later:  # all else is said of sessions that are open
            self._opens = later
            self.wake()
            return draft_pb2.ProposeRequest(opens=opens)
        features = self._features
        frame = draft_pb2.ProposeRequest(
            opens=opens,
            commits=join(self._commits),
            closes=pack(self._closes, U64),
            features=features.take(),
        )
        self._clear()
        self._features = features
        if features:
            self.wake()
        return frame

    async def _handshake(self, channel: grpc.aio.Channel) -> draft_pb2.GetDraftInfoResponse:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        info: draft_pb2.GetDraftInfoResponse = await stub.GetDraftInfo(
            draft_pb2.GetDraftInfoRequest(), timeout=CALL_TIMEOUT
        )
        self._check_version(info.protocol_version)
        if info.HasField("model"):
            check_same(_vocabulary(info.model), _vocabulary(self._target_model))
        self.features = None
        if info.HasField("features"):
            parts = stub.GetFusion(draft_pb2.GetFusionRequest(), timeout=FUSION_TIMEOUT)
            self.features = Features(info.features, [part.content async for part in parts])
            await self.before_up()
        await self._flush(stub)
        return info

    async def _flush(self, stub: Any) -> None:
        """Let it forget what it must, and take up what it shares with the target: it may have been started anew."""
        told = ""
        while (owed := self._owed) is not None:
            await stub.FlushDraft(owed, timeout=SHARE_TIMEOUT)
            told = owed.target_folder
            if self._owed is owed:
                self._owed = None
        if self.features is not None and self.target_folder != told:
            request = draft_pb2.FlushDraftRequest(only_fed=True, target_folder=self.target_folder)
            await stub.FlushDraft(request, timeout=SHARE_TIMEOUT)

    def _open_stream(self, channel: grpc.aio.Channel, metadata: Metadata) -> Any:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        return stub.Propose(metadata=metadata)


def _vocabulary(model: common_pb2.ModelInfo) -> Vocabulary:
    return Vocabulary(model.model_path, model.vocab_size, model.vocab_hash)
