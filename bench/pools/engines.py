"""A simulated target and draft service of a pool: engines that take time only, in the real servers and streams.

The target takes a step whenever it has sessions, and never waits for a proposal: it commits the draft tokens that have
arrived, up to an accept length, and a bonus token. The draft service proposes a chain for each commit. All sequences
count, so every text is known. A target can send hidden states of a given size for each committed token.

`python -m bench.pools.engines target|draft ADDRESS MILLISECONDS ACCEPT_LENGTH ROW_BYTES`

When its first session since the last idle time has output, a process prints the time (time.monotonic) and the session's
prompt, as one number.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.streams.fakes import VOCAB, CountingSequence, LockstepDraft, LockstepEngine, serve_draft, serve_target
from outrider.serving.features import FeatureBlock, FeatureSpec
from outrider.serving.messages import OpenSession, StepOutput
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.proposal import Commit, FinishReason, Proposal


def prompt_of(number: int) -> list[int]:
    """The prompt with a number, which makes it known in every process: two token ids."""
    return [number // VOCAB % VOCAB, number % VOCAB]


def number_of(tokens: Sequence[int] | NDArray[np.uint32]) -> int:
    """The number of a prompt."""
    return int(tokens[0]) * VOCAB + int(tokens[1])


class _Firsts:
    """Prints the first output after an idle time."""

    def __init__(self) -> None:
        self._waiting = True

    def idle(self) -> None:
        """No session is open."""
        self._waiting = True

    def output(self, prompt: int) -> None:
        """A session has output."""
        if self._waiting:
            self._waiting = False
            print(f"{time.monotonic():.6f} {prompt}", flush=True)


class _Sequence(CountingSequence):
    """covered: length up to which its draft tokens reach. prompt: its number."""

    def __init__(self, request: OpenSession) -> None:
        super().__init__(request)
        self.covered = 0
        self.prompt = number_of(request.tokens)
        self.feature_spec = request.feature_spec
        self.features_end = request.features_from


class PoolTarget(LockstepEngine):
    """Steps of a fixed time over all its sessions."""

    sessions: dict[int, _Sequence]  # type: ignore[assignment]

    def __init__(self, seconds: float, accept_length: int, row_bytes: int = 0) -> None:
        """seconds: of a step. accept_length: tokens of a commit, if draft tokens are there. row_bytes: of features"""
        super().__init__(seconds)
        self._seconds, self._accept_length = seconds, accept_length
        self._row = np.zeros((1, row_bytes), np.uint8)
        self._firsts = _Firsts()

    def open(self, request: OpenSession) -> None:
        """Add a session."""
        self.sessions[request.session_id] = _Sequence(request)

    def close(self, session_id: int) -> None:
        """Remove a session."""
        super().close(session_id)
        if not self.sessions:
            self._firsts.idle()

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:  # noqa: ARG002
        """Note how far the draft tokens of each session reach. Those that do not continue its text are dropped."""
        for proposal in proposals:
            session = self.sessions.get(proposal.session_id)
            if session is None or not len(proposal.tokens):
                continue
            expected = session.last + 1 + proposal.anchor_length - session.length
            if int(proposal.tokens[0]) == expected % VOCAB:
                session.covered = max(session.covered, proposal.anchor_length + len(proposal.tokens))

    @property
    def idle(self) -> bool:
        """True without sessions."""
        return not self.sessions

    def step(self) -> StepOutput:
        """Commit tokens in every session, after the time of a step."""
        due = time.perf_counter() + self._seconds
        commits: list[Commit] = []
        features: list[FeatureBlock] = []
        for session_id, session in list(self.sessions.items()):
            base = session.length
            accepted = max(0, min(self._accept_length - 1, session.covered - base, session.end - base - 1))
            verified = max(0, session.covered - base)
            tokens = session.advance(accepted + 1)
            if session.feature_spec and self._row.size:
                features.append(self._states(session_id, session))
            self._firsts.output(session.prompt)
            done = session.length >= session.end
            reason = FinishReason.LENGTH if done else FinishReason.RUNNING
            source = SourceKind.DRAFT if verified else 0
            commits.append(Commit(session_id, base, tokens, session.hash, verified, accepted, reason, source=source))
            if done:
                self.close(session_id)
        output = StepOutput(commits=commits, load=self.load(), features=features)
        time.sleep(max(0.0, due - time.perf_counter()))
        return output

    def _states(self, session_id: int, session: _Sequence) -> FeatureBlock:
        """Rows of the committed tokens that have none yet; the last token is computed in the next step."""
        first, count = session.features_end, session.length - 1 - session.features_end
        session.features_end = session.length - 1
        return FeatureBlock(session_id, first, np.repeat(self._row, count, axis=0), session.feature_spec)


class PoolDraft(LockstepDraft):
    """Proposes a chain for each commit, twice as long as a commit, so that it still helps one step later."""

    def __init__(self, seconds: float, accept_length: int) -> None:
        """seconds: of a step. accept_length: as of the targets."""
        super().__init__(seconds, 2 * accept_length)
        self._prompts: dict[int, int] = {}
        self._firsts = _Firsts()

    def open(self, request: OpenSession) -> None:
        """Add a session."""
        super().open(request)
        self._prompts[request.session_id] = number_of(request.tokens)

    def close(self, session_id: int) -> None:
        """Remove a session."""
        super().close(session_id)
        self._prompts.pop(session_id, None)
        if not self.sessions:
            self._firsts.idle()

    def step(self) -> StepOutput:
        """Propose a chain for each ready session."""
        output = super().step()
        if output.proposals:
            self._firsts.output(self._prompts[output.proposals[0].session_id])
        return output


def main(role: str, address: str, seconds: float, accept_length: int, row_bytes: int) -> int:
    """Serve until a signal. Returns the exit code."""
    engine: Any
    if role == "target":
        engine = partial(PoolTarget, seconds, accept_length, row_bytes)
        return serve_target(engine, address)
    features = FeatureSpec(layers=(1,)) if row_bytes else None
    return serve_draft(partial(PoolDraft, seconds, accept_length), address, "COUNTING", features)


if __name__ == "__main__":
    _role, _address, _milliseconds, _accept_length, _row_bytes = sys.argv[1:]
    sys.exit(main(_role, _address, float(_milliseconds) / 1e3, int(_accept_length), int(_row_bytes)))
