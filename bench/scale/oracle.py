"""A draft service that knows the answers: its proposals are right as often as it is told, and come as late.

Whether it is right at a position is decided once for ever, by the text and the position; so one run is like another,
however its steps fall. It stands for a draft on an accelerator of its own: while it waits, it uses no core.

`python -m bench.scale.oracle ADDRESS TEXTS.json ACCEPTANCE SECONDS TOKENS`, where the file holds lists of token ids
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

_WRONG = 7  # bits that make a token another one
_SURE = 0.98  # a proposal that is always right says so no louder


class Text:
    """A sequence that is known, and what is proposed at each position. tokens, proposed: [n] uint32."""

    def __init__(self, number: int, tokens: Sequence[int], acceptance: float) -> None:
        self.tokens = np.array(tokens, np.uint32)
        right = np.random.default_rng([number, len(tokens)]).random(len(tokens)) < acceptance
        self.proposed = np.where(right, self.tokens, self.tokens ^ np.uint32(_WRONG))

    def begins(self, tokens: NDArray[np.uint32]) -> bool:
        """True if it begins with these."""
        return len(tokens) <= len(self.tokens) and bool((self.tokens[: len(tokens)] == tokens).all())


class _Session:
    def __init__(self, text: Text, tokens: NDArray[np.uint32]) -> None:
        self.text, self.length = text, len(tokens)


class OracleEngine(Engine):
    """Proposes a chain after each commit, `seconds` later, for all sessions that wait by then."""

    def __init__(self, texts: Sequence[Text], acceptance: float, seconds: float, count: int) -> None:
        """count: tokens of a chain."""
        self._texts, self._seconds, self._count = texts, seconds, count
        self._score = math.log(min(max(acceptance, 1 - _SURE), _SURE))
        self._sessions: dict[int, _Session] = {}
        self._roots: dict[int, int] = {}  # path hash of those that wait for a proposal

    def open(self, request: OpenSession) -> None:
        """Take a session on, if its text is known."""
        text = next((text for text in self._texts if text.begins(request.tokens)), None)
        if text is not None:
            self._sessions[request.session_id] = _Session(text, request.tokens)

    def close(self, session_id: int) -> None:
        """Forget a session."""
        self._sessions.pop(session_id, None)
        self._roots.pop(session_id, None)

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        """Follow commits. A session that leaves its text is of no further interest."""
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
        """True if nobody waits."""
        return not self._roots

    def step(self) -> StepOutput:
        """One chain for each session that waits."""
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
        """Sessions at present."""
        return EngineLoad(running_sessions=len(self._sessions))

    def check(self) -> None:
        """Nothing to audit."""


def main(address: str, file: str, acceptance: float, seconds: float, count: int) -> int:
    """Serve until a signal."""
    texts = [Text(i, tokens, acceptance) for i, tokens in enumerate(json.loads(Path(file).read_text()))]
    return serve_draft(lambda: OracleEngine(texts, acceptance, seconds, count), address, "ORACLE")


if __name__ == "__main__":
    _address, _file, _acceptance, _seconds, _count = sys.argv[1:]
    sys.exit(main(_address, _file, float(_acceptance), float(_seconds), int(_count)))
