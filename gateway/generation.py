"""From a checked request to parts of text: what REST and gRPC share.

Tokens come from the orchestrator; text leaves in parts, one for each commit that completes some. However a generation
ends, its session is closed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from gateway.metrics import Metrics
from gateway.orchestrator import Orchestrator
from gateway.session import Session
from gateway.text.stop import StopMatcher
from gateway.text.tokenizer import ModelTokenizer
from outrider.errors import ContextTooLong, InvalidRequest, ModelNotFound, OutriderError
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams, StopConditions

MAX_STOPS = 16


@dataclass(frozen=True)
class GenerationRequest:
    """What a client wants. max_tokens None is the rest of the context; seed None is drawn."""

    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Part:
    """Text and tokens that are new, and the totals so far. finish: RUNNING unless it is the last part."""

    text: str
    tokens: Sequence[int] = field(repr=False)
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    steps: int
    verified: int
    accepted: int
    seed: int


class Generator:
    """Runs requests against one served model."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        tokenizer: ModelTokenizer,
        metrics: Metrics,
        *,
        name: str,
        vocab_size: int,
        max_session_tokens: int,
    ) -> None:
        """name: of the served model. max_session_tokens: prompt and answer together."""
        self.orchestrator = orchestrator
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.name = name
        self.vocab_size = vocab_size
        self.max_session_tokens = max_session_tokens

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound unless the name is the served model's, "default" or nothing."""
        if name not in (None, "", "default", self.name):
            raise ModelNotFound(f"the model `{name}` is not served here; ask for `{self.name}`", param="model")

    def prepare(self, request: GenerationRequest) -> Session:
        """Check a request against the model and open its session. Raises InvalidRequest, Unavailable."""
        length, limit = len(request.prompt), self.max_session_tokens
        if length == 0:
            raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.vocab_size:
            wrong = next(token for token in request.prompt if not 0 <= token < self.vocab_size)
            raise InvalidRequest(f"token id {wrong} is not in the vocabulary of {self.vocab_size}", param="prompt")
        wanted = request.max_tokens
        if length >= limit or (wanted is not None and length + wanted > limit):
            answer = "" if wanted is None else f" and {wanted} tokens of answer"
            raise ContextTooLong(
                f"this model's context is {limit} tokens; {length} tokens of prompt{answer} do not fit; shorten them",
                param="prompt",
            )
        for token in request.stop_token_ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(f"stop token id {token} is not in the vocabulary", param="stop_token_ids")
        if len(request.stops) > MAX_STOPS:
            raise InvalidRequest(f"at most {MAX_STOPS} stop strings are allowed", param="stop")
        stop = StopConditions(
            limit - length if wanted is None else wanted, request.min_tokens, request.stop_token_ids, request.ignore_eos
        )
        seed = secrets.randbits(63) if request.seed is None else request.seed % 2**64
        return self.orchestrator.open(request.prompt, replace(request.sampling, seed=seed), stop)

    async def run(self, session: Session, stops: Sequence[str]) -> AsyncIterator[Part]:
        """The parts of an opened session; the last one has a finish reason. Raises the error that ended it."""
        text = _Text(self.tokenizer, stops)
        completed = 0  # tokens before a stop string ended the text, it included
        outcome = "abort"
        self.metrics.running_requests.inc()
        try:
            while True:
                committed = await session.next()
                if not completed:
                    self.metrics.first_token.observe(time.perf_counter() - session.opened_at)
                piece, used = text.add(committed.tokens, last=committed.finish != FinishReason.RUNNING)
                completed += used
                finish = FinishReason.STOP if text.stopped else committed.finish
                yield _part(session, piece, committed.tokens[:used], completed, finish)
                if finish != FinishReason.RUNNING:
                    outcome = finish.name.lower()
                    return
        except OutriderError:
            outcome = "error"
            raise
        finally:
            self.orchestrator.close(session)
            self._observe(session, outcome)

    def _observe(self, session: Session, outcome: str) -> None:
        self.metrics.running_requests.dec()
        self.metrics.requests.labels(outcome).inc()
        self.metrics.duration.observe(time.perf_counter() - session.opened_at)
        if session.steps:
            self.metrics.accept_length.observe(session.new_tokens / session.steps)


class _Text:
    """Text of one generation: detokenized, and cut at stop strings."""

    def __init__(self, tokenizer: ModelTokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopMatcher(stops)
        self._watching = bool(stops)

    @property
    def stopped(self) -> bool:
        """True once a stop string has ended the text."""
        return self._matcher.stopped

    def add(self, tokens: Sequence[int], *, last: bool) -> tuple[str, int]:
        """Text that can be given out, and how many of the tokens it took; what follows a stop string is dropped."""
        if not self._watching:
            return self._detokenizer.add(tokens) + (self._detokenizer.finish() if last else ""), len(tokens)
        piece = ""
        for used, token in enumerate(tokens, start=1):
            piece += self._matcher.push(self._detokenizer.add([token]))
            if self.stopped:
                return piece, used
        if last:
            piece += self._matcher.push(self._detokenizer.finish())
            piece += "" if self.stopped else self._matcher.finish()
        return piece, len(tokens)


def _part(session: Session, text: str, tokens: Sequence[int], completed: int, finish: FinishReason) -> Part:
    return Part(
        text=text,
        tokens=tokens,
        finish=finish,
        prompt_tokens=session.prompt_length,
        completion_tokens=completed,
        steps=session.steps,
        verified=session.verified,
        accepted=session.accepted,
        seed=session.sampling.seed,
    )


async def merged(parts: Sequence[AsyncIterator[Part]]) -> AsyncIterator[tuple[int, Part]]:
    """Parts of several generations as they come, with the generation's index. The first error ends all."""
    queue: asyncio.Queue[tuple[int, Part | BaseException | None]] = asyncio.Queue()

    async def drain(index: int, source: AsyncIterator[Part]) -> None:
        try:
            async for part in source:
                queue.put_nowait((index, part))
            queue.put_nowait((index, None))
        except OutriderError as error:
            queue.put_nowait((index, error))

    if len(parts) == 1:
        async for part in parts[0]:
            yield 0, part
        return
    tasks = [asyncio.create_task(drain(i, source)) for i, source in enumerate(parts)]
    try:
        open_sources = len(tasks)
        while open_sources:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                open_sources -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
