"""A simulated draft service with a given acceptance and latency: it knows the answers and corrupts some tokens.

Whether the draft token of a position is correct depends only on text and position, so runs are reproducible for any
sequence of steps. It simulates a draft service on its own accelerator: it sleeps for its latency and uses no core.

`python -m bench.scale.oracle ADDRESS TEXTS.json ACCEPTANCE SECONDS TOKENS`, where the file has lists of token ids
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.streams.fakes import serve_draft
from outrider.serving.loop import Engine
from outrider.serving.messages import EngineLoad, OpenSession, StepOutput
from outrider.speculation.proposal import Commit, FinishReason, Proposal

_WRONG_TOKEN_XOR = 7  # turns a token into a different one
_MAX_CLAIMED = 0.98  # upper bound of the claimed acceptance probability; 1 minus it is the lower bound


class Text:
    """A known sequence and the draft token of each position. tokens, proposed: [n] uint32."""

    def __init__(self, number: int, tokens: Sequence[int], acceptance: float) -> None:
        self.tokens = np.array(tokens, np.uint32)
        correct = np.random.default_rng([number, len(tokens)]).random(len(tokens)) < acceptance
        self.proposed = np.where(correct, self.tokens, self.tokens ^ np.uint32(_WRONG_TOKEN_XOR))

    def starts_with(self, tokens: NDArray[np.uint32]) -> bool:
        """True if the sequence starts with these tokens."""
        return len(tokens) <= len(self.tokens) and bool((self.tokens[: len(tokens)] == tokens).all())


class _Session:
    def __init__(self, text: Text, tokens: NDArray[np.uint32]) -> None:
        self.text, self.length = text, len(tokens)


class OracleEngine(Engine):
    """Proposes a draft chain after each commit, `seconds` later, in one batch for all waiting sessions."""

    def __init__(self, texts: Sequence[Text], acceptance: float, seconds: float, count: int) -> None:
        """count: draft tokens of a chain."""
        self._texts, self._seconds, self._count = texts, seconds, count
        self._score = math.log(min(max(acceptance, 1 - _MAX_CLAIMED), _MAX_CLAIMED))
        self._sessions: dict[int, _Session] = {}
        self._roots: dict[int, int] = {}  # path hashes of the sessions that wait for a proposal

    def open(self, request: OpenSession) -> None:
        """Add a session if its text is known."""
        text = next((text for text in self._texts if text.starts_with(request.tokens)), None)
        if text is not None:
            self._sessions[request.session_id] = _Session(text, request.tokens)

    def close(self, session_id: int) -> None:
        """Remove a session."""
        self._sessions.pop(session_id, None)
        self._roots.pop(session_id, None)

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        """Apply commits. A session that deviates from its text is removed."""
        del proposals
        for commit in commits:
            session = self._sessions.get(commit.session_id)
            if session is None:
                continue
            end = commit.base_length + len(commit.tokens)
            known = session.text.tokens[commit.base_length : end]
            if commit.finish_reason != FinishReason.RUNNING or not np.array_equal(known, commit.tokens):
                self.close(commit.session_id)
            else:
                session.length = end
                self._roots[commit.session_id] = commit.root_hash

    @property
    def idle(self) -> bool:
        """True if no session waits for a proposal."""
        return not self._roots

    def step(self) -> StepOutput:
        """Propose a chain for each waiting session."""
        time.sleep(self._seconds)
        proposals = []
        for session_id, root in self._roots.items():
            session = self._sessions[session_id]
            tokens = session.text.proposed[session.length : session.length + self._count]
            chain = np.arange(-1, len(tokens) - 1, dtype=np.int32)
            scores = np.full(len(tokens), self._score, np.float32)
            proposals.append(Proposal(session_id, session.length, root, tokens, chain, scores, session.length))
        self._roots.clear()
        return StepOutput(proposals=proposals, load=self.load())

    def load(self) -> EngineLoad:
        """The number of sessions."""
        return EngineLoad(running_sessions=len(self._sessions))

    def check(self) -> None:
        """Nothing to audit."""


def main(address: str, file: str, acceptance: float, seconds: float, count: int) -> int:
    """Serve until a signal. Returns the exit code."""
    texts = [Text(i, tokens, acceptance) for i, tokens in enumerate(json.loads(Path(file).read_text()))]
    return serve_draft(lambda: OracleEngine(texts, acceptance, seconds, count), address, "ORACLE")


if __name__ == "__main__":
    _address, _file, _acceptance, _seconds, _count = sys.argv[1:]
    sys.exit(main(_address, _file, float(_acceptance), float(_seconds), int(_count)))
