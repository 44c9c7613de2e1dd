"""From a request to a running generation: checks it against the model, admits it, and opens its session.

REST, the gateway's gRPC service and the facades share this.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from gateway.admission.admission import Admission
from gateway.admission.caller import CALLER
from gateway.orchestration.generation import Generation, SharedPrompt
from gateway.orchestration.orchestrator import Orchestrator
from gateway.orchestration.sampling_defaults import OPENAI, SamplingDefaults
from gateway.sessions.request import GenerationRequest
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.spans import CURRENT, RequestSpan
from gateway.text.answer import AnswerText
from gateway.text.encoding import run_in_thread_if_long
from gateway.text.stop import MAX_STOP_CHARACTERS, MAX_STOPS
from gateway.text.tokenizer import ModelTokenizer
from outrider.errors import ContextTooLong, InvalidRequest
from outrider.serving.messages import cache_salt_of

MAX_STOP_TOKENS = 1024
# Over all answers of a request: as JSON they take about 70 MB, which are built in a few seconds beside other streams.
MAX_PROMPT_LOGPROBS = 1 << 20
MAX_PROMPT_TOKENS = 1 << 24  # over all answers of a request, because each session is opened with its own copy
_TURN_SECONDS = 0.005  # for which sessions of one request are opened before other coroutines run


Ids = str | tuple[str, ...]  # the ids by which a generation can be aborted, such as those of request and choice


class _Starting:
    """A request of this caller whose answers are not all started yet.

    aborted: predicates of the ids of generations that are aborted at their start
    """

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self.aborted: list[Callable[[Ids], bool]] = []


class Generator:
    """Runs requests for one served model."""

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
        defaults: SamplingDefaults = OPENAI,
        aliases: Sequence[str] = (),
    ) -> None:
        """name: of the served model; aliases: its other names.

        max_session_tokens: of prompt and answer, until targets have reported theirs. timeout: of every answer, in
        seconds. defaults: sampling parameters for requests that omit them
        """
        self.admission = admission or Admission()
        self.orchestrator = orchestrator
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.name = name
        self.names = (name, *aliases)
        self.running = 0  # generations
        self.defaults = defaults
        self.vocab_size = vocab_size
        self._timeout = timeout
        self._max_session_tokens = max_session_tokens
        self._running: dict[tuple[str, str], set[Generation]] = {}  # by the caller's name and request id
        self._starting: set[_Starting] = set()

    @property
    def max_session_tokens(self) -> int:
        """Tokens of prompt and answer that the largest target holds, whether it is up or not."""
        return self.orchestrator.sessions.max_session_tokens or self._max_session_tokens

    # --- starting ---

    async def start_all(
        self, requests: Sequence[tuple[GenerationRequest, Ids]], span: RequestSpan | None = None
    ) -> list[Generation]:
        """Start the answers of one request, in turns with other work for clients. The caller must close them.

        requests: with their ids. span: as in start. Raises as start, and InvalidRequest for too many; none is left then
        """
        self.admission.check(len(requests))
        tokens = sum(len(request.prompt) for request, _ in requests)
        if len(requests) > 1 and tokens > MAX_PROMPT_TOKENS:
            raise InvalidRequest(
                f"the prompts of its {len(requests)} answers have {tokens} tokens in all; at most {MAX_PROMPT_TOKENS} "
                "are allowed; ask for fewer at a time",
                param=requests[0][0].prompt_field,
            )
        check_prompt_logprobs([request for request, _ in requests])
        starting, started = _Starting(CALLER.get().name), list[Generation]()
        shared: dict[int, SharedPrompt] = {}  # by identity of the prompt, which the answers to it have in common
        self._starting.add(starting)
        clock = asyncio.get_running_loop().time
        try:
            await self.admission.turns.request()
            due = clock() + _TURN_SECONDS
            for request, ids in requests:
                if clock() >= due:
                    await asyncio.sleep(0)
                    due = clock() + _TURN_SECONDS
                own = request
                if request.prompt_logprobs is not None and id(request.prompt) in shared:
                    own = replace(request, prompt_logprobs=None)
                generation = self.start(own, ids, span)
                started.append(generation)
                if request.prompt_logprobs is not None:
                    generation.shared = shared.setdefault(id(request.prompt), SharedPrompt())
                if any(matches(ids) for matches in starting.aborted):
                    generation.abort()
        except BaseException:
            for generation in started:
                generation.close()
            raise
        finally:
            self._starting.discard(starting)
        return started

    def start(self, request: GenerationRequest, ids: Ids = "", span: RequestSpan | None = None) -> Generation:
        """Check a request against the model and open its session. Raises InvalidRequest, Overloaded, Unavailable.

        The request is CALLER's. ids: for abort. span: of the request; by default that of the running HTTP request
        """
        span = span or CURRENT.get()
        traceparent = span.join(request, self.name) if span is not None else ""
        resolved = self._resolve(request, traceparent)
        self.admission.enter()
        try:
            generation = self._open(resolved, ids)
        except BaseException:
            self.admission.leave(refused=True)
            raise
        self.running += 1
        if span is not None:
            generation.span = span
            span.hold()
        return generation

    def _resolve(self, request: GenerationRequest, traceparent: str) -> GenerationRequest:
        """The request with max_tokens, seed, timeout and its caller's caches filled in. Raises InvalidRequest."""
        self._check(request)
        stop, context = request.stop, self.max_session_tokens
        rest = context - len(request.prompt)
        max_tokens = rest if stop.max_tokens is None else stop.max_tokens
        if max_tokens > rest and stop.clamp:
            max_tokens = rest
        if rest < 1 or max_tokens > rest:
            answer = f" and {max_tokens} of answer" if rest >= 1 else ""
            raise ContextTooLong(
                f"this model's context has {context} tokens; a prompt of {len(request.prompt)} tokens"
                f"{answer} does not fit; shorten it",
                param=request.prompt_field,
            )
        self.check_tokens(request.prompt, request.prompt_field)  # last: a prompt that is too long may have millions
        timeout = min((t for t in (stop.timeout, self._timeout) if t is not None), default=None)
        stop = replace(stop, max_tokens=max_tokens, timeout=timeout)
        stop.conditions  # noqa: B018 - raises InvalidRequest before the request is admitted
        seed = secrets.randbits(63) if request.seed is None else request.seed % 2**64
        # A top_k above the vocabulary keeps all tokens; the wire has no room for larger numbers.
        sampling = replace(request.sampling, seed=seed, top_k=min(request.sampling.top_k, self.vocab_size))
        draft_tokens = 0 if request.prompt_only else request.max_draft_tokens
        return replace(
            request,
            sampling=sampling,
            stop=stop,
            cache_salt=cache_salt_of(CALLER.get().caches, request.cache_salt),
            max_draft_tokens=draft_tokens,
            traceparent=traceparent,
            caller=CALLER.get().identity,
        )

    def _open(self, request: GenerationRequest, ids: Ids) -> Generation:
        sessions = self.orchestrator.sessions
        session = sessions.open(request)
        before = () if request.text.new_text else request.prompt
        detokenizer = self.tokenizer.detokenizer(before, verbatim=request.text.verbatim)
        stop = request.stop
        text = AnswerText(detokenizer, stop.strings, stop.min_tokens, include_stop=request.text.include_stop)
        generation = Generation(sessions, self.metrics, session, text)
        caller = CALLER.get().name
        keys = [(caller, one) for one in _each(ids)]
        for key in keys:
            self._running.setdefault(key, set()).add(generation)
        generation.on_close = partial(self._remove, keys, generation)
        generation.retry_after = self.admission.retry_after
        return generation

    def _remove(self, keys: Sequence[tuple[str, str]], generation: Generation) -> None:
        self.admission.leave(refused=generation.refused)
        self.running -= 1
        for key in keys:
            of_request = self._running[key]
            of_request.discard(generation)
            if not of_request:
                del self._running[key]

    # --- aborting ---

    def take_over(self, former: Generator) -> None:
        """The generations of another generator, which run on there, can be aborted here, too."""
        for key, generations in self._running.items():
            former._running.setdefault(key, set()).update(generations)
        former._starting |= self._starting
        self._running, self._starting = former._running, former._starting

    def abort(self, request_id: str, owner: str | None) -> int:
        """End the generations with exactly this id; their client keeps the text so far. Returns their number.

        owner: name of the caller whose requests may be ended; None for all callers
        """

        def matches(ids: Ids) -> bool:
            return request_id in _each(ids)

        for starting in self._starting:
            if owner in (None, starting.caller):
                starting.aborted.append(matches)
        if owner is not None:
            found = list(self._running.get((owner, request_id), ()))
        else:
            found = [one for (_, name), of_id in self._running.items() if name == request_id for one in of_id]
        return sum(generation.abort() for generation in found)

    def abort_all(self) -> int:
        """End all generations and other sessions. Returns the number of sessions."""
        for starting in self._starting:
            starting.aborted.append(lambda _: True)
        others = sum(generation.abort() for of_id in list(self._running.values()) for generation in list(of_id))
        return others + self.orchestrator.sessions.abort_all()

    # --- checks ---

    def answered_as(self, name: str | None) -> str:
        """The model's name in an answer: that of the request; the first one if it has none, or "default"."""
        return self.name if name is None or name in ("", "default") else name

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for a token id outside the vocabulary. param: field of the request, for the error."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise InvalidRequest(f"token id {wrong} is not in the vocabulary of {self.vocab_size} tokens", param=param)

    async def decode_all(
        self, lists: Sequence[Sequence[int]], param: str = "prompt", *, verbatim: bool = False
    ) -> list[str]:
        """Texts of lists of tokens. Raises InvalidRequest for unknown tokens. verbatim: with special tokens."""

        def decoded() -> list[str]:
            for tokens in lists:
                self.check_tokens(tokens, param)
            return [self.tokenizer.decode(tokens, verbatim=verbatim) for tokens in lists]

        return await run_in_thread_if_long(lists, decoded)

    def _check(self, request: GenerationRequest) -> None:
        stop = request.stop
        check_prompt_logprobs([request])
        if not request.prompt:
            raise InvalidRequest("the prompt is empty; send at least one token", param=request.prompt_field)
        if len(stop.strings) > MAX_STOPS:
            raise InvalidRequest(f"at most {MAX_STOPS} stop strings are allowed", param="stop")
        if (length := sum(map(len, stop.strings))) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"the stop strings have {length} characters in all; at most {MAX_STOP_CHARACTERS} are allowed",
                param="stop",
            )
        if len(stop.token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(f"at most {MAX_STOP_TOKENS} stop tokens are allowed", param="stop_token_ids")
        if "" in stop.strings:
            raise InvalidRequest("a stop string must not be empty", param="stop")
        biased = [token for token, _ in request.sampling.logit_bias]
        for tokens, param in ((stop.token_ids, "stop_token_ids"), (biased, "logit_bias")):
            self.check_tokens(tokens, param)


def _each(ids: Ids) -> tuple[str, ...]:
    """The different ids."""
    return (ids,) if isinstance(ids, str) else tuple(dict.fromkeys(ids))


def check_prompt_logprobs(requests: Sequence[GenerationRequest]) -> None:
    """Raise InvalidRequest if the answers to one request report too many log-probabilities of prompt tokens."""
    scored = [request for request in requests if request.prompt_logprobs is not None]
    count = sum(len(request.prompt) * (1 + (request.prompt_logprobs or 0)) for request in scored)
    if count > MAX_PROMPT_LOGPROBS:
        longest = max(scored, key=lambda request: len(request.prompt))
        raise InvalidRequest(
            f"the request asks for {count} log-probabilities of prompt tokens: {len(scored)} answers, with up to "
            f"{len(longest.prompt)} prompt tokens, each with its own and {longest.prompt_logprobs} others; at most "
            f"{MAX_PROMPT_LOGPROBS} are allowed; ask for fewer of them, or for fewer answers at a time",
            param="prompt_logprobs",
        )
