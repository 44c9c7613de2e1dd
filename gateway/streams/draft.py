"""The link to a draft replica, and the check that its model fits the target's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

import grpc

from gateway.streams.connection import PLAIN, Connection
from gateway.streams.features import FUSION_TIMEOUT, Backlog, Features
from gateway.streams.frames import cut_opens, join
from gateway.streams.link import CALL_TIMEOUT, Link, check_version
from gateway.streams.replica.frame_stream import StreamType
from outrider.checkpoints.vocabulary import Vocabulary, check_same
from outrider.wire.arrays import U64, pack
from outrider.wire.v1 import common_pb2, draft_pb2, draft_pb2_grpc

_UNLIMITED = "NGRAM"
SHARE_TIMEOUT = 600.0  # seconds for a draft to take the target's weights that it shares


class DraftWeights(NamedTuple):
    """How far a draft follows the target's weights that it shares. reason: why it is stale."""

    version: str
    state: Literal["loading", "current", "stale"]
    reason: str = ""


async def _nothing() -> None:
    """The default of `before_up`."""


class DraftLink(Link[draft_pb2.GetDraftInfoResponse, draft_pb2.ProposeResponse]):
    """Sends opens, commits, hidden states and closes; receives proposals.

    weights: the weights that it shares with the target; None before an update, or if it shares none
    features: the hidden states that the draft needs of the target; None if it needs none
    before_up: called once `features` are known; may raise ConfigError. on_ready: called before it is used
    """

    service = "draft"
    stream_type = StreamType("/outrider.wire.v1.DraftService/Propose", draft_pb2.ProposeResponse, "sent")
    longest_refused_wait = 15.0  # a handshake of a head transfers its fusion layer

    def __init__(self, address: str, target_model: common_pb2.ModelInfo, connection: Connection = PLAIN) -> None:
        """target_model: the model whose vocabulary the draft must share."""
        super().__init__(address, connection)
        self._target_model = target_model
        self._urgent = True  # the last commits asked for draft tokens
        self._due_flush: draft_pb2.FlushDraftRequest | None = None  # before the draft is used again
        self.weights: DraftWeights | None = None
        self.features: Features | None = None
        self.before_up: Callable[[], Awaitable[None]] = _nothing
        self.on_ready: Callable[[DraftLink], None] = lambda _: None
        self.clear()

    def clear(self) -> None:
        """As in Link."""
        self._opens: list[common_pb2.OpenSession] = []
        self._commits: list[common_pb2.CommitBatch] = []
        self._closes: list[int] = []
        self.backlog = Backlog()

    @property
    def feature_spec(self) -> int:
        """Id of the hidden states that the draft needs; 0 for none."""
        return self.features.spec.spec_id if self.features is not None else 0

    @property
    def kind(self) -> tuple[str, ...]:
        """Drafters and model; equal for replicas of the same draft."""
        info = self.info
        return (*info.drafters, info.model.fingerprint) if info is not None else ()

    def follows(self, length: int) -> bool:
        """True if the main drafter supports sessions of this length, in tokens."""
        limit = self.info.max_session_tokens if self.info is not None else 0
        return not limit or length < limit

    def drafts_for(self, length: int) -> bool:
        """True if any drafter supports sessions of this length, in tokens; n-grams have no limit."""
        return self.follows(length) or (self.info is not None and _UNLIMITED in self.info.drafters)

    def open(self, request: common_pb2.OpenSession) -> None:
        """Open a session. Earlier messages for it are sent first, except hidden states, which are of its last run."""
        self._opens.append(request)
        self.backlog.drop(request.session_id)
        self._urgent |= not request.drafting_paused
        self._signal()

    def commit(self, batch: common_pb2.CommitBatch) -> None:
        """Relay commits; while drafting is paused, many in one frame."""
        self._commits.append(batch)
        if not all(batch.finish_reasons):  # the end of a session does not pause drafting for others
            self._urgent = any(batch.draft_budgets)
        self._signal()

    def flush_later(self, request: draft_pb2.FlushDraftRequest) -> None:
        """Flush before the draft is used again: it may have lost no more than its stream, and kept its caches."""
        if self._due_flush is None or self._due_flush.only_fed:
            self._due_flush = request

    def _signal(self) -> None:
        if self._urgent:
            self.stream.outgoing.set()
        else:
            self.stream.outgoing.set_later()

    def feed(self, batch: common_pb2.FeatureBatch) -> bool:
        """Relay hidden states, behind the commits so far. False if the backlog is full."""
        taken = self.backlog.add(batch)
        self._signal()
        return taken

    def close(self, session_id: int) -> None:
        """Close a session."""
        self._closes.append(session_id)
        self.stream.outgoing.set()

    def take_frame(self) -> draft_pb2.ProposeRequest:
        """As in Link."""
        opens, later = cut_opens(self._opens)
        if later:  # all other messages refer to open sessions
            self._opens = later
            self.stream.outgoing.set()
            return draft_pb2.ProposeRequest(opens=opens)
        backlog = self.backlog
        frame = draft_pb2.ProposeRequest(
            opens=opens,
            commits=join(self._commits),
            closes=pack(self._closes, U64),
            features=backlog.take(),
        )
        self.clear()
        self.backlog = backlog
        if backlog:
            self.stream.outgoing.set()
        return frame

    async def handshake(self, channel: grpc.aio.Channel) -> draft_pb2.GetDraftInfoResponse:
        """As in Link."""
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        info: draft_pb2.GetDraftInfoResponse = await stub.GetDraftInfo(
            draft_pb2.GetDraftInfoRequest(), timeout=CALL_TIMEOUT
        )
        check_version(self.service, self.address, info.protocol_version)
        if info.HasField("model"):
            check_same(_vocabulary(info.model), _vocabulary(self._target_model))
        self.features = None
        if info.HasField("features"):
            parts = stub.GetFusion(draft_pb2.GetFusionRequest(), timeout=FUSION_TIMEOUT)
            self.features = Features(info.features, [part.content async for part in parts])
            await self.before_up()
        await self._flush(stub)
        return info

    async def prepare(self, channel: grpc.aio.Channel) -> None:
        """As in Link."""
        del channel
        self.on_ready(self)

    async def _flush(self, stub: Any) -> None:
        """Send the flush that is due."""
        while (due := self._due_flush) is not None:
            await stub.FlushDraft(due, timeout=CALL_TIMEOUT)
            if self._due_flush is due:
                self._due_flush = None


def _vocabulary(model: common_pb2.ModelInfo) -> Vocabulary:
    return Vocabulary(model.model_path, model.vocab_size, model.vocab_hash)
