"""A generation: what is asked for, and its answer, part by part.

Tokens come from the orchestrator; text leaves in parts, one for what a step committed. However a generation ends, its
session is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from gateway.orchestration.orchestrator import Orchestrator
from gateway.sessions.request import PROMPT
from gateway.sessions.session import Committed, Session
from gateway.sessions.step_stats import Report, Round
from gateway.telemetry import request_log
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.spans import RequestSpan
from gateway.text.answer import AnswerText
from outrider.errors import DeadlineExceeded, OutriderError, Overloaded
from outrider.speculation.proposal import FinishReason, Logprobs


class Part(NamedTuple):
    """Text and tokens that are new, and the totals so far. finish: RUNNING unless it is the last part.

    spoken: how many of the tokens are text; a token that ended the answer is not
    logprobs: of the tokens, if asked for; prompt_logprobs: of the prompt's but the first, with the first part alone
    rounds: the steps that the tokens came from
    matched: the stop string or the token that ended the answer. report: of the whole answer, with its last part
    """

    text: str
    tokens: list[int]
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    steps: int
    verified: int
    accepted: int
    seed: int
    cached_tokens: int
    spoken: int
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    weight_version: str
    rounds: Sequence[Round]
    matched: str | int | None = None
    report: Report | None = None


class Generation:
    """One generation under way. Whoever starts it must close it; closing frees its session, wherever it stands."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        metrics: Metrics,
        session: Session,
        text: AnswerText,
        timeout: float | None = None,
        *,
        silent: bool = False,
        prompt_field: str = PROMPT,
    ) -> None:
        """timeout: of the answer, seconds. silent: its new token is not told of. prompt_field: as in the request."""
        self._silent = silent
        self._prompt_field = prompt_field
        self._timeout = timeout
        self._deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        self._orchestrator = orchestrator
        self._metrics = metrics
        self._session = session
        self._text = text
        self._outcome = "abort"
        self._closed = False
        self.on_close: Callable[[], None] = lambda: None
        self.come_back: Callable[[], int] = lambda: 1  # seconds after which to ask again, where no target had room
        self.span: RequestSpan | None = None
        metrics.running_requests.inc()

    @property
    def refused(self) -> bool:
        """True if no target had room for it."""
        return self._outcome == "overloaded"

    async def next(self) -> Part:
        """The next part; none follows the one that has a finish reason. Raises the error that ended the session."""
        session, text = self._session, self._text
        try:
            tokens, finish, rounds, told = await (session.next() if self._deadline is None else self._in_time())
        except OutriderError as error:
            self._outcome = "overloaded" if isinstance(error, Overloaded) else "error"
            if error.param == PROMPT:
                error.param = self._prompt_field
            if self.refused and error.retry_after is None:
                error.retry_after = self.come_back()
            raise
        if self._silent and finish is not FinishReason.ABORT:
            tokens, rounds, told = [], [], None
            finish = FinishReason.LENGTH if finish is not FinishReason.RUNNING else finish
        piece, used = text.add(tokens, finish)
        spoken = used - (finish is FinishReason.STOP and not text.stopped and not text.include_stop)
        matched: str | int | None = None
        verified, accepted = session.verified, session.accepted
        if text.stopped:
            tokens, finish, matched = tokens[:used], FinishReason.STOP, text.matched
            rounds, told_of = _cut(rounds, used), _cut(session.rounds, text.count)
            verified, accepted = (sum(one.verified for one in told_of), sum(one.accepted for one in told_of))
            self._orchestrator.close(session)  # the services know no stop strings, and others of the answer may go on
        elif finish is FinishReason.STOP and tokens:
            matched = tokens[-1]
        prompt_told, session.prompt_told = session.prompt_told, None
        if finish is not FinishReason.RUNNING:
            self._outcome = finish.name.lower()
        return Part(
            piece,
            tokens,
            finish,
            session.prompt_length,
            text.count,
            session.steps,
            verified,
            accepted,
            session.sampling.seed,
            session.cached_tokens,
            spoken,
            told.until(used) if told is not None else None,
            prompt_told,
            session.weight_version,
            rounds,
            matched,
            self._report() if finish is not FinishReason.RUNNING else None,
        )

    async def _in_time(self) -> Committed:
        """What was committed, unless the time is over first. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._session.next()
        except TimeoutError:
            raise DeadlineExceeded(f"the answer was not complete within {self._timeout:g} s") from None

    def _report(self) -> Report:
        session = self._session
        return Report(
            _cut(session.rounds, self._text.count),
            session.prompt_length,
            session.cached_tokens,
            self._text.count,
            session.first_at - session.opened_at,
            session.committed_at - session.first_at,
        )

    def abort(self) -> bool:
        """End it where it stands; its last part says so. False if it has ended already."""
        return self._orchestrator.abort(self._session)

    def close(self) -> None:
        """Free the session. May be called twice."""
        if self._closed:
            return
        self._closed = True
        session, metrics = self._session, self._metrics
        self._orchestrator.close(session)
        self.on_close()
        metrics.running_requests.dec()
        metrics.requests.labels(self._outcome).inc()
        metrics.duration.observe(time.perf_counter() - session.opened_at)
        if session.steps:
            metrics.accept_length.observe(session.new_tokens / session.steps)
        request_log.ended(session, self._outcome)
        if self.span is not None:
            self.span.leave(session, self._outcome)


def _cut(rounds: Sequence[Round], tokens: int) -> list[Round]:
    """The steps of the first tokens; of the one in which they end, only what belongs to them."""
    kept: list[Round] = []
    for one in rounds:
        if tokens <= 0:
            break
        kept.append(one._replace(tokens=min(one.tokens, tokens), accepted=min(one.accepted, tokens)))
        tokens -= one.tokens
    return kept


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Part]]:
    """Parts of several generations as they come, with the generation's index. The first error ends all."""
    queue: asyncio.Queue[tuple[int, Part | Exception]] = asyncio.Queue()

    async def drain(index: int, generation: Generation) -> None:
        try:
            finish = FinishReason.RUNNING
            while finish is FinishReason.RUNNING:
                part = await generation.next()
                finish = part.finish
                queue.put_nowait((index, part))
        except Exception as error:
            queue.put_nowait((index, error))

    running = len(generations)
    # One alone needs neither task nor queue.
    tasks = [asyncio.create_task(drain(i, g)) for i, g in enumerate(generations)] if running > 1 else []
    try:
        while running:
            index, item = await queue.get() if tasks else (0, await generations[0].next())
            if isinstance(item, Exception):
                raise item
            yield index, item
            running -= item.finish is not FinishReason.RUNNING
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
