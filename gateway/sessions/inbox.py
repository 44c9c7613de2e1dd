"""Commits on their way from a session to its client's coroutine, which takes them in its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from gateway.sessions.step_stats import StepStats
from outrider.errors import OutriderError
from outrider.speculation.proposal import FinishReason, Logprobs

InTurn = Callable[[Callable[[], object]], object]
"""Does a piece of work for a client when it is its turn."""


class Committed(NamedTuple):
    """New tokens of a session, and the steps that they came from. finish: RUNNING unless they are the last."""

    tokens: list[int]
    finish: FinishReason
    steps: list[StepStats]
    logprobs: Logprobs | None = None


class Inbox:
    """Commits that the client has not received yet."""

    def __init__(self, steps: list[StepStats], in_turn: InTurn) -> None:
        """steps: of the session, which grow with every commit. in_turn: wakes the client's coroutine."""
        self._in_turn = in_turn
        self._due = False  # it waits for its turn
        self._new = False  # there is something that the client's coroutine has not taken
        self.finish = FinishReason.RUNNING
        self.prompt_logprobs: Logprobs | None = None  # once they are known, until the client receives them
        self._steps = steps
        self._steps_taken = 0
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []  # of `_tokens`
        self._error: OutriderError | None = None
        self._filled = asyncio.Event()

    def put(self, tokens: list[int], finish: FinishReason, logprobs: Logprobs | None) -> None:
        """Add committed tokens, and wake the waiting coroutine in its turn."""
        self.finish = finish
        self._tokens += tokens
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._new = True
        if not self._due:
            self._due = True
            self._in_turn(self._wake)

    def _wake(self) -> None:
        self._due = False
        if self._new:
            self._filled.set()

    def fail(self, error: OutriderError) -> None:
        """End with an error, which `next` raises behind the tokens that are still here."""
        self._error = error
        self._filled.set()

    async def next(self) -> Committed:
        """Everything committed since the last call. Raises the OutriderError that ended the session."""
        await self._filled.wait()
        tokens, self._tokens, self._new = self._tokens, [], False
        if self._error is None:
            self._filled.clear()
        elif not tokens:
            raise self._error
        logprobs, self._logprobs = self._logprobs, []
        steps, self._steps_taken = self._steps[self._steps_taken :], len(self._steps)
        return Committed(tokens, self.finish, steps, Logprobs.joined(logprobs) if logprobs else None)
