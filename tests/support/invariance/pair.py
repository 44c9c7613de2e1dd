"""A target engine and a draft engine, connected in memory with faults on demand, in place of the gateway.

Messages are encoded as the frames of the streams. A test steps the engines by hand, so that runs are repeatable, and
messages can be lost, duplicated, delayed and reordered. Features travel with the commits, or in frames of their
own where there are faults; a drafter that has lost some gets them from the beginning.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outrider.serving.loop import Engine
from outrider.serving.messages import Message, OpenSession, StepOutput
from outrider.speculation.proposal import Commit, FinishReason, Proposal
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.wire import codec
from services.draft.drafters.base import Drafter


@dataclass(frozen=True)
class Faults:
    """Probabilities that a message is lost or doubled, and most iterations of delay, which also reorders."""

    lost: float = 0.0
    doubled: float = 0.0
    delay: int = 0


@dataclass
class Transport:
    """Frames in transit in one direction."""

    faults: Faults
    random: random.Random
    in_transit: list[tuple[int, Any]] = field(default_factory=list)

    def send(self, frame: Any, now: int) -> None:
        copies = 0 if self.random.random() < self.faults.lost else 1 + (self.random.random() < self.faults.doubled)
        for _ in range(copies):
            self.in_transit.append((now + self.random.randint(0, self.faults.delay), frame))

    def arrivals(self, now: int) -> list[Any]:
        due = [frame for when, frame in self.in_transit if when <= now]
        self.in_transit = [(when, frame) for when, frame in self.in_transit if when > now]
        if self.faults.delay:
            self.random.shuffle(due)
        return [type(frame).FromString(frame.SerializeToString()) for frame in due]


@dataclass
class Result:
    """New tokens by session, and counts of steps and draft tokens."""

    tokens: dict[int, list[int]]
    reasons: dict[int, FinishReason]
    steps: int = 0
    verified: int = 0
    accepted: int = 0
    reopened: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / max(1, self.verified)


class Pair:
    """Runs sessions to their end. `make_draft` makes a draft engine, or is None for plain decoding."""

    def __init__(
        self,
        target: Engine,
        make_draft: Callable[[], Engine] | None = None,
        faults: Faults = Faults(),
        *,
        seed: int = 0,
        draft_steps: int = 6,
        killed_from: int = -1,
        killed_until: int = -1,
    ) -> None:
        """draft_steps: most draft steps between two target steps.

        killed_from, killed_until: iterations between which there is no draft engine
        """
        self.target, self.make_draft = target, make_draft
        self.draft = make_draft() if make_draft else None
        self.compiled = self.draft.load().compilations if self.draft else 0
        self.random = random.Random(seed)
        self.proposals = Transport(faults, self.random)
        self.commits = Transport(faults, self.random)
        self.draft_steps = draft_steps
        self.features = self._configure()
        self.features_sent: dict[int, int] = {}  # by session, the first position whose features are still to be sent
        self.killed = (killed_from, killed_until)

    def _configure(self) -> int:
        """Id of the features that the drafter reads; 0 for none."""
        drafter = getattr(self.draft, "drafter", None)
        if not isinstance(drafter, Drafter) or drafter.features is None:
            return 0
        spec = drafter.features.id(drafter.fusion)
        self.target.features.configure(spec, drafter.features, drafter.fusion)
        return spec

    def run(self, requests: Sequence[OpenSession], limit: int = 5000) -> Result:
        self.requests = {r.session_id: r for r in requests}
        self.tokens: dict[int, list[int]] = {r.session_id: r.tokens.tolist() for r in requests}
        self.result = Result({}, {})
        for request in requests:
            self._open_target(request.session_id)
            self._open_draft(request.session_id)
        for now in range(limit):
            if len(self.result.tokens) == len(requests):
                break
            self._iterate(now)
        else:
            raise AssertionError("the sessions do not end")
        self._audit()
        return self.result

    def _iterate(self, now: int) -> None:
        if now == self.killed[0]:
            self.draft = None
            self.proposals.in_transit.clear()
            self.commits.in_transit.clear()
        if now == self.killed[1]:
            self.draft = self.make_draft()
            self.compiled = self.draft.load().compilations
            for session_id in sorted(self.requests.keys() - self.result.tokens.keys()):
                self._reopen_draft(session_id)
        for frame in self.proposals.arrivals(now):
            self.target.receive(codec.propose_response_from_pb(frame).proposals, [])
        output = self.target.step()
        assert output.failures == []
        self.result.steps += 1
        for commit in output.commits:
            self._commit(commit)
        if self.draft is not None:
            self._relay(output, now)
            self._draft(now)

    def _relay(self, output: StepOutput, now: int) -> None:
        blocks = []
        for block in output.features:  # skip blocks from before the session was opened again
            if block.first <= self.features_sent[block.session_id]:
                self.features_sent[block.session_id] = block.first + len(block.rows)
                blocks.append(block)
        if self.commits.faults == Faults():
            self.commits.send(codec.propose_request_to_pb(Message(commits=output.commits, features=blocks)), now)
            return
        self.commits.send(codec.propose_request_to_pb(Message(commits=output.commits)), now)
        if blocks:
            self.commits.send(codec.propose_request_to_pb(Message(features=blocks)), now)

    def _draft(self, now: int) -> None:
        for frame in self.commits.arrivals(now):
            message = codec.propose_request_from_pb(frame)[0]
            self.draft.receive([], message.commits)
            if message.features:
                self.draft.receive_features(message.features)
        for _ in range(self.random.randint(0, self.draft_steps) if self.proposals.faults.delay else self.draft_steps):
            if self.draft.idle:
                break
            output = self.draft.step()
            for failure in output.failures:
                self.result.reopened += 1
                if failure.session_id not in self.result.tokens:
                    self._reopen_draft(failure.session_id)
            if output.proposals:
                self.proposals.send(codec.propose_response_to_pb(output), now)

    def _open_target(self, session_id: int) -> None:
        self.features_sent[session_id] = 0
        tokens = np.array(self.tokens[session_id], np.uint32)
        self.target.open(replace(self.requests[session_id], tokens=tokens, feature_spec=self.features))

    def _reopen_draft(self, session_id: int) -> None:
        self._open_draft(session_id)
        if self.features:
            self._open_target(session_id)

    def _open_draft(self, session_id: int) -> None:
        if self.draft is not None:
            tokens = np.array(self.tokens[session_id], np.uint32)
            self.draft.open(replace(self.requests[session_id], tokens=tokens))

    def _commit(self, commit: Commit) -> None:
        tokens = self.tokens[commit.session_id]
        assert commit.base_length == len(tokens)
        assert 0 <= commit.accepted <= commit.verified
        tokens += commit.tokens.tolist()
        self.result.verified += commit.verified
        self.result.accepted += commit.accepted
        if commit.finish_reason != FinishReason.RUNNING:
            prompt = self.requests[commit.session_id].prompt_length
            self.result.tokens[commit.session_id] = tokens[prompt:]
            self.result.reasons[commit.session_id] = commit.finish_reason

    def _audit(self) -> None:
        """After the sessions, all pages of both engines are free."""
        for session_id in self.requests:
            if self.draft is not None:
                self.draft.close(session_id)
        for engine in (self.target, self.draft):
            if engine is not None:
                engine.check()
                load = engine.load()
                assert load.running_sessions == load.waiting_sessions == 0
                assert load.free_pages == load.total_pages
        if self.draft is not None:
            assert self.draft.load().compilations == self.compiled, "a program was compiled while serving"


def request(
    session_id: int, prompt: Sequence[int], temperature: float, max_tokens: int = 48, **options: Any
) -> OpenSession:
    """A session with a seed of its own. options: of SamplingParams."""
    params = SamplingParams(temperature=temperature, seed=1000 + session_id, **options)
    stop = StopConditions(max_tokens, ignore_eos=True)
    return OpenSession(session_id, np.array(prompt, np.uint32), len(prompt), params, stop)


class GarbageDraft(Engine):
    """Proposes random and impossible tokens below real, stale and invented anchors."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.vocab = vocab
        self.sessions: dict[int, tuple[int, int]] = {}
        self.fresh = False

    def open(self, request: OpenSession) -> None:
        from outrider.speculation.proposal import path_hash

        self.sessions[request.session_id] = (len(request.tokens), path_hash(request.tokens))
        self.fresh = True

    def close(self, session_id: int) -> None:
        self.sessions.pop(session_id, None)

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        for commit in commits:
            if self.random.random() < 0.9:  # otherwise it lags behind
                self.sessions[commit.session_id] = (commit.base_length + len(commit.tokens), commit.root_hash)
        self.fresh = True

    @property
    def idle(self) -> bool:
        return not self.fresh

    def step(self) -> StepOutput:
        self.fresh = False
        return StepOutput(proposals=[self._proposal(i, *anchor) for i, anchor in self.sessions.items()])

    def _proposal(self, session_id: int, length: int, path: int) -> Proposal:
        n = int(self.random.integers(1, 24))
        highest = 2**32 if self.random.random() < 0.05 else self.vocab
        tokens = self.random.integers(0, highest, n).astype(np.uint32)
        parents = np.array([self.random.integers(-1, i) if i else -1 for i in range(n)], np.int32)
        scores = self.random.uniform(-3, 0.5, n).astype(np.float32)
        if self.random.random() < 0.1:
            length, path = int(self.random.integers(0, 100)), int(self.random.integers(0, 2**63))
        return Proposal(session_id, length, path, tokens, parents, scores)

    def load(self) -> Any:
        from outrider.serving.messages import EngineLoad

        return EngineLoad()

    def check(self) -> None:
        pass
