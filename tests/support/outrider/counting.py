"""An engine whose tokens can be computed by hand: the next token is the last one plus one.

A proposal is accepted as far as it counts on. Used by tests of everything around an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from outrider.errors import InvalidRequest
from outrider.serving.loop import Engine
from outrider.serving.messages import EngineLoad, OpenSession, StepOutput
from outrider.speculation.proposal import Commit, FinishReason, Proposal, path_hash
from outrider.speculation.sampling import SamplingParams, StopConditions


def request(
    session_id: int = 1, prompt: Sequence[int] = (1, 2), max_tokens: int = 3, committed: Sequence[int] = ()
) -> OpenSession:
    """Opens a session of the counting engine."""
    tokens = np.array([*prompt, *committed], np.uint32)
    return OpenSession(session_id, tokens, len(prompt), SamplingParams(), StopConditions(max_tokens))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, at most 60 s."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


class CountingEngine(Engine):
    """Commits one token per session and step, plus the proposed tokens that are right."""

    def __init__(self) -> None:
        self.sessions: dict[int, tuple[OpenSession, list[int]]] = {}
        self.proposed: dict[int, list[int]] = {}
        self.closed: list[int] = []
        self.steps = 0
        self.broken = False

    def open(self, request: OpenSession) -> None:
        if int(request.tokens[-1]) == 666:
            raise InvalidRequest("666 is not welcome", param="prompt")
        if int(request.tokens[-1]) == 667:
            raise IndexError("a bug that this prompt alone meets")
        self.sessions[request.session_id] = (request, request.tokens.tolist())

    def close(self, session_id: int) -> None:
        if self.sessions.pop(session_id, None) is not None:
            self.closed.append(session_id)

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        for proposal in proposals:
            self.proposed[proposal.session_id] = proposal.tokens.tolist()

    @property
    def idle(self) -> bool:
        return not self.sessions

    def step(self) -> StepOutput:
        if self.broken:
            raise RuntimeError("the device is on fire")
        self.steps += 1
        output = StepOutput(load=self.load())
        for session_id, (request, tokens) in list(self.sessions.items()):
            base = len(tokens)
            proposed_tokens = self.proposed.pop(session_id, [])
            accepted = [t for i, t in enumerate(proposed_tokens) if t == tokens[-1] + 1 + i]
            new = [*accepted, tokens[-1] + len(accepted) + 1]
            new = new[: request.prompt_length + request.stop.max_tokens - base]
            tokens += new
            done = len(tokens) == request.prompt_length + request.stop.max_tokens
            reason = FinishReason.LENGTH if done else FinishReason.RUNNING
            root = path_hash(np.array(tokens))
            output.commits.append(
                Commit(session_id, base, np.array(new, np.uint32), root, len(proposed_tokens), len(accepted), reason)
            )
            if done:
                del self.sessions[session_id]
        return output

    def load(self) -> EngineLoad:
        return EngineLoad(running_sessions=len(self.sessions))

    def check(self) -> None:
        pass
