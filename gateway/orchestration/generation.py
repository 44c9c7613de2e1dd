"""One generation: takes committed tokens from the session's inbox, and returns text part by part.

A part is what one step committed. However a generation ends, its session is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from gateway.orchestration.session_table import SessionTable
from gateway.sessions.inbox import Committed
from gateway.sessions.session import Session
from gateway.sessions.speculation_report import SpeculationReport
from gateway.sessions.step_stats import SourceCounts, StepStats, first_steps, source_counts
from gateway.telemetry import request_log
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.spans import RequestSpan
from gateway.text.answer import AnswerText
from outrider.errors import DeadlineExceeded, OutriderError, Overloaded
from outrider.speculation.proposal import FinishReason, Logprobs


class Part(NamedTuple):
    """New text and tokens, and the totals so far. finish: RUNNING unless it is the last part.

    text_tokens: number of the tokens that are text; a token that ended the answer is not
    logprobs: of the tokens, if requested; prompt_logprobs: of all prompt tokens but the first, in the first part only
    step_stats: the steps that the tokens came from; steps, verified, accepted: totals; sources: the last two by source
    matched: the stop string or stop token that ended the answer. report: of the whole answer, in its last part
    """

    text: str
    tokens: list[int]
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    steps: int
    verified: int
    accepted: int
    cached_tokens: int
    text_tokens: int
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    sources: SourceCounts
    weight_version: str
    step_stats: Sequence[StepStats]
    matched: str | int | None = None
    report: SpeculationReport | None = None


class SharedPrompt:
    """The log-probabilities of a prompt that several generations have: the first one asks for them, for all.

    None if the first one ended without them, or if the prompt has a single token.
    """

    def __init__(self) -> None:
        self._known = asyncio.Event()
        self._logprobs: Logprobs | None = None

    def put(self, logprobs: Logprobs | None) -> None:
        """The first generation has them; later calls do nothing."""
        if not self._known.is_set():
            self._logprobs = logprobs
            self._known.set()

    async def get(self) -> Logprobs | None:
        """The log-probabilities, once they are known."""
        await self._known.wait()
        return self._logprobs


class Generation:
    """A running generation. Its owner must call `close`, which frees the session at any point.

    on_close: called once by `close`. retry_after: seconds after which to retry if no target had room
    shared: log-probabilities of the prompt, which this generation asked for or another one; None once they are sent
    """

    def __init__(self, sessions: SessionTable, metrics: Metrics, session: Session, text: AnswerText) -> None:
        timeout = session.request.stop.timeout
        self._deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        self._sessions = sessions
        self._metrics = metrics
        self._session = session
        self._text = text
        self._prompt_only = session.request.prompt_only
        self._outcome = "abort"
        self._closed = False
        self.on_close: Callable[[], None] = lambda: None
        self.retry_after: Callable[[], int] = lambda: 1
        self.span: RequestSpan | None = None
        self.shared: SharedPrompt | None = None
        metrics.running_requests.inc()

    @property
    def seed(self) -> int:
        """Seed of the generation."""
        return self._session.request.sampling.seed

    @property
    def deadline(self) -> float | None:
        """When the answer must be complete and sent, by the event loop's clock; None for no deadline."""
        return self._deadline

    @property
    def refused(self) -> bool:
        """True if no target had room for it."""
        return self._outcome == "overloaded"

    async def next(self) -> Part:
        """The next part; the one with a finish reason is the last. Raises the error that ended the session."""
        session, text = self._session, self._text
        stats = session.stats
        try:
            tokens, finish, steps, logprobs = await (
                session.inbox.next() if self._deadline is None else self._next_in_time()
            )
        except OutriderError as error:
            self._outcome = "overloaded" if isinstance(error, Overloaded) else "error"
            error.param = session.request.client_field(error.param)
            if self.refused and error.retry_after is None:
                error.retry_after = self.retry_after()
            raise
        if self._prompt_only and finish is not FinishReason.ABORT:
            tokens, steps, logprobs = [], [], None
            finish = FinishReason.LENGTH if finish is not FinishReason.RUNNING else finish
        piece, used = text.add(tokens, finish)
        text_tokens = used - (finish is FinishReason.STOP and not text.stopped and not text.include_stop)
        matched: str | int | None = None
        verified, accepted, sources = stats.verified, stats.accepted, stats.sources
        if text.stopped:
            tokens, finish, matched = tokens[:used], FinishReason.STOP, text.matched
            steps, counted = first_steps(steps, used), first_steps(stats.steps, text.count)
            verified, accepted = (sum(step.verified for step in counted), sum(step.accepted for step in counted))
            sources = source_counts(counted)
            # The services do not know stop strings, and other choices of the answer may continue.
            self._sessions.close(session)
        elif finish is FinishReason.STOP and tokens:
            matched = tokens[-1]
        prompt_logprobs, session.inbox.prompt_logprobs = session.inbox.prompt_logprobs, None
        if self.shared is not None:
            prompt_logprobs = await self._share(self.shared, prompt_logprobs)
        if finish is not FinishReason.RUNNING:
            self._outcome = finish.name.lower()
        return Part(
            piece,
            tokens,
            finish,
            session.prompt_length,
            text.count,
            len(stats.steps),
            verified,
            accepted,
            stats.cached_tokens,
            text_tokens,
            logprobs.until(used) if logprobs is not None else None,
            prompt_logprobs,
            sources,
            stats.weight_version,
            steps,
            matched,
            self._report() if finish is not FinishReason.RUNNING else None,
        )

    async def _share(self, shared: SharedPrompt, own: Logprobs | None) -> Logprobs | None:
        """The log-probabilities of the prompt, for the first part. own: those that this generation received."""
        self.shared = None
        if self._session.request.prompt_logprobs is None:
            return await shared.get()
        shared.put(own)
        return own

    async def _next_in_time(self) -> Committed:
        """The next commit. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._session.inbox.next()
        except TimeoutError:
            timeout = self._session.request.stop.timeout
            raise DeadlineExceeded(f"the answer was not complete within {timeout:g} s") from None

    def _report(self) -> SpeculationReport:
        stats, count = self._session.stats, self._text.count
        return SpeculationReport(
            first_steps(stats.steps, count),
            self._session.prompt_length,
            stats.cached_tokens,
            count,
            stats.first_at - stats.opened_at,
            stats.committed_at - stats.first_at,
        )

    def abort(self) -> bool:
        """End it; its last part has the finish reason ABORT. False if it has ended already."""
        return self._sessions.abort(self._session)

    def unread(self) -> None:
        """Count an answer that is cut because its client does not read it."""
        self._metrics.unread_answers.inc()

    def close(self) -> None:
        """Free the session. May be called twice."""
        if self._closed:
            return
        self._closed = True
        session, metrics = self._session, self._metrics
        self._sessions.close(session)
        if self.shared is not None and session.request.prompt_logprobs is not None:
            self.shared.put(None)
        self.on_close()
        metrics.running_requests.dec()
        metrics.requests.labels(self._outcome).inc()
        metrics.duration.observe(time.perf_counter() - session.stats.opened_at)
        if session.stats.steps:
            metrics.accept_length.observe(session.new_tokens / len(session.stats.steps))
        request_log.answer_ended(session, self._outcome, self._sessions.model)
        if self.span is not None:
            self.span.leave(session, self._outcome)


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Part]]:
    """Parts of several generations as they arrive, with the generation's index. The first error ends all.

    While the caller takes none, what is committed gathers in the sessions, as plain tokens, and not in the queue.
    """
    queue: asyncio.Queue[tuple[int, Part | Exception]] = asyncio.Queue(len(generations))

    async def drain(index: int, generation: Generation) -> None:
        try:
            finish = FinishReason.RUNNING
            while finish is FinishReason.RUNNING:
                part = await generation.next()
                finish = part.finish
                await queue.put((index, part))
        except Exception as error:
            await queue.put((index, error))

    running = len(generations)
    # A single generation needs neither task nor queue.
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
