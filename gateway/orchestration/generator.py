"""From a checked request to a generation: what REST and gRPC share."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gateway.admission.admission import Admission
from gateway.orchestration.generation import Generation
from gateway.orchestration.orchestrator import Orchestrator
from gateway.orchestration.sampling_defaults import OPENAI, SamplingDefaults
from gateway.sessions.request import GenerationRequest
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.spans import CURRENT, RequestSpan
from gateway.text import encoding
from gateway.text.answer import AnswerText
from gateway.text.tokenizer import ModelTokenizer
from outrider.errors import ContextTooLong, InvalidRequest, ModelNotFound
from outrider.speculation.sampling import SamplingParams, StopConditions

MAX_STOPS = 16
MAX_STOP_TOKENS = 1024
MAX_PROMPT_TOKENS = 1 << 24  # of all answers of a request together: each is opened with its own
_BREATH = 0.005  # seconds for which the sessions of one request may be opened, until others have their turn


class _Starting:
    """A request some of whose answers are yet to be started. aborted: which of them end then, by their ids."""

    def __init__(self) -> None:
        self.aborted: list[Callable[[str], bool]] = []


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
        defaults: SamplingDefaults = OPENAI,
    ) -> None:
        """name: of the served model. max_session_tokens: of prompt and answer, until targets have said theirs.

        timeout: of any answer, seconds. defaults: of what requests leave out.
        """
        self.admission = admission or Admission()
        self._timeout = timeout
        self.orchestrator = orchestrator
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.name = name
        self.defaults = defaults
        self.vocab_size = vocab_size
        self._max_session_tokens = max_session_tokens
        self._running: dict[str, set[Generation]] = {}  # by request
        self._starting: set[_Starting] = set()

    @property
    def max_session_tokens(self) -> int:
        """Tokens of prompt and answer, as many as the largest target can hold, one that is away for the moment, too."""
        return self.orchestrator.longest or self._max_session_tokens

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
                param=request.prompt_field,
            )
        self._check_tokens(request.prompt, request.prompt_field)  # last, for one that does not fit may have millions
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

    async def start_all(
        self, requests: Sequence[tuple[GenerationRequest, str]], span: RequestSpan | None = None
    ) -> AsyncIterator[Generation]:
        """Start the answers of one request, one after another; others have their turns in between.

        Whoever takes them closes them. requests: with the id of each. span: as of start. Raises as start.
        """
        self.admission.check(len(requests))
        tokens = sum(len(request.prompt) for request, _ in requests)
        if len(requests) > 1 and tokens > MAX_PROMPT_TOKENS:
            raise InvalidRequest(
                f"the prompts of its {len(requests)} answers have {tokens} tokens in all; at most {MAX_PROMPT_TOKENS} "
                "are allowed; ask for fewer at a time",
                param=requests[0][0].prompt_field,
            )
        starting = _Starting()
        self._starting.add(starting)
        clock = asyncio.get_running_loop().time
        due = clock() + _BREATH
        try:
            for request, request_id in requests:
                if clock() >= due:
                    await asyncio.sleep(0)
                    due = clock() + _BREATH
                generation = self.start(request, request_id, span)
                if any(named(request_id) for named in starting.aborted):
                    generation.abort()
                yield generation
        finally:
            self._starting.discard(starting)

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
        generation = Generation(
            self.orchestrator,
            self.metrics,
            session,
            text,
            timeout,
            silent=silent,
            prompt_field=request.prompt_field,
        )
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

    def abort(self, request_id: str, *, prefix: bool = False) -> int:
        """End a request's generations; its client keeps what it has got. Returns how many there were.

        Where it has several prompts or choices, their ids go on behind its own with a hyphen.
        prefix: those of all requests whose ids begin so
        """
        begin = request_id if prefix else f"{request_id}-"

        def named(name: str) -> bool:
            return name == request_id or name.startswith(begin)

        for starting in self._starting:
            starting.aborted.append(named)
        found = [own for name, own in self._running.items() if named(name)]
        return sum(generation.abort() for own in found for generation in own)

    def abort_all(self) -> int:
        """End all generations, and whatever else is under way. Returns how many sessions there were."""
        for starting in self._starting:
            starting.aborted.append(lambda _: True)
        return self.orchestrator.abort_all()

    def _check(self, request: GenerationRequest) -> None:
        if not request.prompt:
            raise InvalidRequest("the prompt is empty; send at least one token", param=request.prompt_field)
        if len(request.stops) > MAX_STOPS:
            raise InvalidRequest(f"at most {MAX_STOPS} stop strings are allowed", param="stop")
        if len(request.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(f"at most {MAX_STOP_TOKENS} stop tokens are allowed", param="stop_token_ids")
        if "" in request.stops:
            raise InvalidRequest("a stop string must not be empty", param="stop")
        biased = [token for token, _ in request.sampling.logit_bias]
        for tokens, param in ((request.stop_token_ids, "stop_token_ids"), (biased, "logit_bias")):
            self._check_tokens(tokens, param)

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise InvalidRequest(f"token id {wrong} is not in the vocabulary of {self.vocab_size} tokens", param=param)
