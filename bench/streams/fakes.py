"""A simulated target and draft service: engines that only sleep, in the real servers and streams.

They run in lockstep: the target steps when every session has a new proposal, the draft service proposes once per
commit. So a step is one frame of commits and one frame of proposals, each over two streams. An engine sleeps for its
step time, like an engine that waits for an accelerator.

`python -m bench.streams.fakes target|draft ADDRESS MILLISECONDS [unchecked]`; unchecked: as of bench.streams.checks
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider import PROTOCOL_VERSION
from outrider.serving.features import FeatureSpec
from outrider.serving.loop import Engine
from outrider.serving.messages import EngineLoad, OpenSession, StepOutput
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.proposal import Commit, FinishReason, Proposal, extend_hash, path_hash
from outrider.transport.rpc import serve_engine
from outrider.wire import codec
from outrider.wire.features import feature_spec_to_pb
from outrider.wire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

VOCAB = 4096
NODES = 4  # draft tokens of a proposal
_SCORE = -0.2  # of a draft token, as a log-probability
_MAX_SESSIONS = 1024


class CountingSequence:
    """A sequence in which every token is the previous one plus one."""

    def __init__(self, request: OpenSession) -> None:
        self.length, self.last = len(request.tokens), int(request.tokens[-1])
        self.hash = path_hash(request.tokens)
        self.end = request.prompt_length + request.stop.max_tokens

    def advance(self, count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Append `count` tokens. Returns them: [count] uint32."""
        tokens = (np.arange(self.last + 1, self.last + 1 + count) % VOCAB).astype(np.uint32)
        for token in tokens.tolist():
            self.hash = extend_hash(self.hash, token)
        self.length += count
        self.last = int(tokens[-1])
        return tokens


class LockstepEngine(Engine):
    """Sessions, and the subset that is ready for a step."""

    def __init__(self, seconds: float = 0.0) -> None:
        """seconds: of a step."""
        self._step_seconds = seconds
        self.sessions: dict[int, CountingSequence] = {}
        self.ready: set[int] = set()

    def open(self, request: OpenSession) -> None:
        """Add a session."""
        self.sessions[request.session_id] = CountingSequence(request)
        self.on_open(request.session_id)

    def on_open(self, session_id: int) -> None:
        """Hook of subclasses for a new session."""

    def close(self, session_id: int) -> None:
        """Remove a session."""
        self.sessions.pop(session_id, None)
        self.ready.discard(session_id)

    def load(self) -> EngineLoad:
        """The number of sessions."""
        return EngineLoad(running_sessions=len(self.sessions))

    def check(self) -> None:
        """Nothing to audit."""

    def sleep(self) -> None:
        """Sleep for the time of a step."""
        if self._step_seconds:
            time.sleep(self._step_seconds)


class LockstepTarget(LockstepEngine):
    """Commits one accepted and one bonus token per session, when all sessions have a proposal."""

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:  # noqa: ARG002
        """Mark sessions with a current proposal as ready."""
        for proposal in proposals:
            session = self.sessions.get(proposal.session_id)
            if session is not None and session.hash == proposal.anchor_hash:
                self.ready.add(proposal.session_id)

    @property
    def idle(self) -> bool:
        """True until every session has a proposal."""
        return not self.sessions or len(self.ready) < len(self.sessions)

    def step(self) -> StepOutput:
        """Commit up to two tokens in every session."""
        self.sleep()
        commits = []
        for session_id, session in list(self.sessions.items()):
            base = session.length
            tokens = session.advance(min(2, session.end - base))
            done = session.length == session.end
            reason = FinishReason.LENGTH if done else FinishReason.RUNNING
            commits.append(
                Commit(session_id, base, tokens, session.hash, NODES, len(tokens) - 1, reason, source=SourceKind.DRAFT)
            )
            if done:
                del self.sessions[session_id]
        self.ready.clear()
        return StepOutput(commits=commits, load=self.load())


class LockstepDraft(LockstepEngine):
    """Proposes a chain of draft tokens per commit."""

    def __init__(self, seconds: float = 0.0, nodes: int = NODES) -> None:
        """seconds: of a step. nodes: draft tokens of a chain."""
        super().__init__(seconds)
        self._nodes = nodes
        self._parents = np.arange(-1, nodes - 1, dtype=np.int32)
        self._scores = np.full(nodes, _SCORE, dtype=np.float32)

    def on_open(self, session_id: int) -> None:
        """The first proposal needs no commit."""
        self.ready.add(session_id)

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:  # noqa: ARG002
        """Apply commits and mark their sessions as ready."""
        for commit in commits:
            if commit.finish_reason != FinishReason.RUNNING:
                self.close(commit.session_id)
            elif (session := self.sessions.get(commit.session_id)) is not None:
                session.length, session.last = commit.base_length + len(commit.tokens), int(commit.tokens[-1])
                session.hash = commit.root_hash
                self.ready.add(commit.session_id)

    @property
    def idle(self) -> bool:
        """True if every commit has its proposal."""
        return not self.ready

    def step(self) -> StepOutput:
        """Propose a chain for each ready session."""
        self.sleep()
        proposals = []
        for session_id in self.ready:
            session = self.sessions[session_id]
            tokens = (np.arange(session.last + 1, session.last + 1 + self._nodes) % VOCAB).astype(np.uint32)
            proposals.append(
                Proposal(session_id, session.length, session.hash, tokens, self._parents, self._scores, session.length)
            )
        self.ready.clear()
        return StepOutput(proposals=proposals, load=self.load())


def _model() -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(
        model_path="counting", architecture="Counting", vocab_size=VOCAB, context_length=1 << 20
    )


def _tokenizer() -> bytes:
    tokenizer = Tokenizer(models.BPE(vocab={f"Ġw{i}": i for i in range(VOCAB)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str().encode()


class _Target(target_pb2_grpc.TargetServiceServicer):
    def __init__(self, hub: Any) -> None:
        self._hub = hub

    async def GetTargetInfo(self, request: Any, context: Any) -> target_pb2.GetTargetInfoResponse:  # noqa: ARG002, N802
        """Facts."""
        return target_pb2.GetTargetInfoResponse(
            protocol_version=PROTOCOL_VERSION,
            model=_model(),
            max_session_tokens=1 << 20,
            max_running_sessions=_MAX_SESSIONS,
            max_draft_tokens=8,
            page_size=16,
        )

    async def ConfigureFeatures(self, request_iterator: Any, context: Any) -> Any:  # noqa: ARG002, N802
        """Take any specification: the rows have the size that the engine was started with."""
        async for _ in request_iterator:
            pass
        return target_pb2.ConfigureFeaturesResponse()

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ARG002, N802
        """The tokenizer."""
        yield target_pb2.GetTokenizerResponse(file_name="tokenizer.json", content=_tokenizer())

    async def Verify(self, request_iterator: Any, context: Any) -> None:  # noqa: ARG002, N802
        """The stream."""
        await self._hub.answer(context, target_pb2.VerifyRequest)


class _Draft(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, hub: Any, name: str, features: FeatureSpec | None) -> None:
        self._hub = hub
        self._name = name
        self._features = feature_spec_to_pb(features, b"") if features is not None else None

    async def GetDraftInfo(self, request: Any, context: Any) -> draft_pb2.GetDraftInfoResponse:  # noqa: ARG002, N802
        """Facts."""
        return draft_pb2.GetDraftInfoResponse(
            protocol_version=PROTOCOL_VERSION,
            drafters=[self._name],
            max_running_sessions=_MAX_SESSIONS,
            features=self._features,
        )

    async def GetFusion(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ARG002, N802
        """No fusion layer: the target sends its states as they are."""
        parts: tuple[Any, ...] = ()
        for part in parts:
            yield part

    async def Propose(self, request_iterator: Any, context: Any) -> None:  # noqa: ARG002, N802
        """The stream."""
        await self._hub.answer(context, draft_pb2.ProposeRequest)


def serve_target(engine: Callable[[], Engine], address: str) -> int:
    """Serve an engine as a target service until a signal. Returns the exit code."""

    def register(server: Any, hub: Any, _: Any) -> list[str]:
        target_pb2_grpc.add_TargetServiceServicer_to_server(_Target(hub), server.server)
        return ["outrider.wire.v1.TargetService"]

    coders: tuple[Any, Any] = (codec.verify_request_from_pb, codec.verify_response_to_pb)
    return uvloop.run(serve_engine(engine, address, *coders, register))


def serve_draft(engine: Callable[[], Engine], address: str, name: str, features: FeatureSpec | None = None) -> int:
    """Serve an engine as a draft service until a signal. Returns the exit code.

    name: of its drafter. features: hidden states that it reads
    """

    def register(server: Any, hub: Any, _: Any) -> list[str]:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(_Draft(hub, name, features), server.server)
        return ["outrider.wire.v1.DraftService"]

    coders: tuple[Any, Any] = (codec.propose_request_from_pb, codec.propose_response_to_pb)
    return uvloop.run(serve_engine(engine, address, *coders, register))


def main(role: str, address: str, seconds: float) -> int:
    """Serve until a signal. seconds: of a step. Returns the exit code."""
    if role == "draft":
        return serve_draft(partial(LockstepDraft, seconds), address, "COUNTING")
    return serve_target(partial(LockstepTarget, seconds), address)


if __name__ == "__main__":
    if sys.argv[4:] == ["unchecked"]:
        from bench.streams.checks import remove_checks

        remove_checks()
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3]) / 1e3))
