"""From a checked request to parts of text: what REST and gRPC share.

Tokens come from the orchestrator; text leaves in parts, one for what a step committed. However a generation ends, its
session is closed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from gateway import request_log
from gateway.admission import Admission
from gateway.metrics import Metrics
from gateway.orchestrator import Orchestrator
from gateway.report import Report, Round
from gateway.session import Committed, Session
from gateway.spans import CURRENT, RequestSpan
from gateway.text import encoding
from gateway.text.answer import AnswerText
from gateway.text.tokenizer import ModelTokenizer
from outrider.errors import ContextTooLong, DeadlineExceeded, InvalidRequest, ModelNotFound, OutriderError, Overloaded
from outrider.serving.messages import Grammar
from outrider.speculation.proposal import FinishReason, Logprobs
from outrider.speculation.sampling import SamplingParams, StopConditions

MAX_STOPS = 16


@dataclass(frozen=True)
class GenerationRequest:
    """What a client wants, after the edge's own checks.

    max_tokens: None is the rest of the context; 0 tells of the prompt alone. clamp: one that does not fit is cut
        instead of refused.
    seed: None draws one; numbers below 0 count from the end of 64 bits.
    include_stop: the text ends with what ended it, a stop string or token. verbatim: special tokens are text, too.
    timeout: seconds after which it ends with DeadlineExceeded.
    grammar, logprobs, prompt_logprobs, priority, max_draft_tokens: as in OpenSession.
    watched: rounds tell what the draft guessed.
    begins: the text is one of its own, as an answer in a chat is, and does not go on where the prompt ends.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int | None = None
    clamp: bool = False
    min_tokens: int = 0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop: bool = False
    verbatim: bool = False
    timeout: float | None = None
    priority: int = 0
    max_draft_tokens: int | None = None
    watched: bool = False
    begins: bool = False


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
        admission: Admission | None = None,
        timeout: float | None = None,
    ) -> None:
        """name: of the served model. max_session_tokens: of prompt and answer, or more once a larger target was met.

        timeout: of any answer, seconds.
        """
        self.admission = admission or Admission()
        self._timeout = timeout
        self.orchestrator = orchestrator
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.name = name
        self.vocab_size = vocab_size
        self._max_session_tokens = max_session_tokens
        self._running: dict[str, set[Generation]] = {}  # by request

    @property
    def max_session_tokens(self) -> int:
        """Tokens of prompt and answer, as many as the largest target that has been met can hold."""
        return max(self._max_session_tokens, self.orchestrator.longest)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound unless the name is the served model's, "default" or nothing."""
        if name not in (None, "", "default", self.name):
            raise ModelNotFound(f"the model `{name}` is not served here; ask for `{self.name}`", param="model")

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a raw prompt."""
        (tokens,) = await self.encode_all([text], special=special)
        return tokens

    async def encode_all(self, prompts: Sequence[str | list[int]], *, special: bool = True) -> list[list[int]]:
        """Tokens of raw prompts; of those that are tokens, themselves."""
        return await encoding.encode_all(self.tokenizer, prompts, special=special)

    def decode(self, tokens: Sequence[int], param: str = "prompt", *, verbatim: bool = False) -> str:
        """Text of tokens. Raises InvalidRequest for tokens that there are not. verbatim: with special ones."""
        self._check_tokens(tokens, param)
        return self.tokenizer.decode(tokens, verbatim=verbatim)

    async def decode_all(
        self, lists: Sequence[Sequence[int]], param: str = "prompt", *, verbatim: bool = False
    ) -> list[str]:
        """Texts of lists of tokens, as of decode."""
        return await encoding.worked(lists, lambda: [self.decode(one, param, verbatim=verbatim) for one in lists])

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation. Raises InvalidRequest."""
        return await encoding.encode_chat(self.tokenizer, messages, options)

    def start(self, request: GenerationRequest, request_id: str = "", span: RequestSpan | None = None) -> Generation:
        """Check a request against the model and open its session. Raises InvalidRequest, Overloaded, Unavailable.

        request_id: by which it can be aborted. span: of the request, by default that of the HTTP request under way
        """
        span = span or CURRENT.get()
        traceparent = span.join(request, self.name) if span is not None else ""
        self._check(request)
        rest = self.max_session_tokens - len(request.prompt)
        max_tokens = rest if request.max_tokens is None else request.max_tokens
        if max_tokens > rest and request.clamp:
            max_tokens = rest
        if rest < 1 or max_tokens > rest:
            answer = f" and {max_tokens} of answer" if rest >= 1 else ""
            raise ContextTooLong(
                f"this model's context has {self.max_session_tokens} tokens; a prompt of {len(request.prompt)} tokens"
                f"{answer} does not fit; shorten it",
                param="prompt",
            )
        stop = StopConditions(max(max_tokens, 1), request.min_tokens, request.stop_token_ids, request.ignore_eos)
        seed = secrets.randbits(63) if request.seed is None else request.seed % 2**64
        # More than there are is all of them; the wire has no room for just any number.
        sampling = replace(request.sampling, seed=seed, top_k=min(request.sampling.top_k, self.vocab_size))
        self.admission.enter()
        try:
            generation = self._open(request, request_id, sampling, stop, traceparent)
        except BaseException:
            self.admission.leave(refused=True)
            raise
        if span is not None:
            generation.span = span
            span.hold()
        return generation

    def _open(
        self,
        request: GenerationRequest,
        request_id: str,
        sampling: SamplingParams,
        stop: StopConditions,
        traceparent: str,
    ) -> Generation:
        session = self.orchestrator.open(
            request.prompt,
            sampling,
            stop,
            cache_salt=request.cache_salt,
            grammar=request.grammar,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            priority=request.priority,
            max_draft_tokens=request.max_draft_tokens if request.max_tokens != 0 else 0,
            traceparent=traceparent,
            watched=request.watched,
        )
        before = () if request.begins else request.prompt
        detokenizer = self.tokenizer.detokenizer(before, verbatim=request.verbatim)
        text = AnswerText(detokenizer, request.stops, request.min_tokens, include_stop=request.include_stop)
        timeout = min((t for t in (request.timeout, self._timeout) if t is not None), default=None)
        silent = request.max_tokens == 0
        generation = Generation(self.orchestrator, self.metrics, session, text, timeout, silent=silent)
        self._running.setdefault(request_id, set()).add(generation)
        generation.on_close = partial(self._forget, request_id, generation)
        generation.come_back = self.admission.come_back
        return generation

    def _forget(self, request_id: str, generation: Generation) -> None:
        self.admission.leave(refused=generation.refused)
        of_request = self._running[request_id]
        of_request.discard(generation)
        if not of_request:
            del self._running[request_id]

    def abort(self, request_id: str) -> int:
        """End a request's generations; its client keeps what it has got. Returns how many there were.

        Where it has several prompts or choices, their ids go on behind its own with a hyphen.
        """
        found = [own for name, own in self._running.items() if name == request_id or name.startswith(f"{request_id}-")]
        generations = [generation for own in found for generation in own]
        for generation in generations:
            generation.abort()
        return len(generations)

    def _check(self, request: GenerationRequest) -> None:
        if not request.prompt:
            raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
        biased = [token for token, _ in request.sampling.logit_bias]
        named = ((request.prompt, "prompt"), (request.stop_token_ids, "stop_token_ids"), (biased, "logit_bias"))
        for tokens, param in named:
            self._check_tokens(tokens, param)
        if len(request.stops) > MAX_STOPS:
            raise InvalidRequest(f"at most {MAX_STOPS} stop strings are allowed", param="stop")
        if "" in request.stops:
            raise InvalidRequest("a stop string must not be empty", param="stop")

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise InvalidRequest(f"token id {wrong} is not in the vocabulary of {self.vocab_size} tokens", param=param)


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
    ) -> None:
        """timeout: of the answer, seconds. silent: its one new token is not told of."""
        self._silent = silent
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

    def abort(self) -> None:
        """End it where it stands; its last part says so."""
        self._orchestrator.abort(self._session)

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
