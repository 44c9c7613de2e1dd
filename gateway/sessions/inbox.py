"""Committed tokens on their way from the target relay to the coroutine that writes the client's answer."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from gateway.sessions.step_stats import StepStats
from outrider.errors import OutriderError
from outrider.speculation.proposal import FinishReason, Logprobs


class Committed(NamedTuple):
    """New tokens of a session, and the steps that they came from. finish: RUNNING unless they are the last."""

    tokens: list[int]
    finish: FinishReason
    steps: list[StepStats]
    logprobs: Logprobs | None = None


class Inbox:
    """Commits that the client has not received yet."""

    def __init__(self, steps: list[StepStats]) -> None:
        """steps: of the session, which grow with every commit."""
        self.finish = FinishReason.RUNNING
        self.prompt_logprobs: Logprobs | None = None  # once they are known, until the client receives them
        self._steps = steps
        self._steps_taken = 0
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []  # of `_tokens`
        self._error: OutriderError | None = None
        self._filled = asyncio.Event()

    def put(self, tokens: list[int], finish: FinishReason, logprobs: Logprobs | None) -> None:
        """Add committed tokens and wake the waiting coroutine."""
        self.finish = finish
        self._tokens += tokens
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._filled.set()

    def fail(self, error: OutriderError) -> None:
        """End with an error, which `next` raises behind the tokens that are still here."""
        self._error = error
        self._filled.set()

    async def next(self) -> Committed:
        """Everything committed since the last call. Raises the OutriderError that ended the session."""
        await self._filled.wait()
        tokens, self._tokens = self._tokens, []
        if self._error is None:
            self._filled.clear()
        elif not tokens:
            raise self._error
        logprobs, self._logprobs = self._logprobs, []
        steps, self._steps_taken = self._steps[self._steps_taken :], len(self._steps)
        return Committed(tokens, self.finish, steps, Logprobs.joined(logprobs) if logprobs else None)
