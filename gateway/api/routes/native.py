"""SGLang's own POST /generate: texts or token ids in, text and token ids out, log-probabilities, and what it cost.

Events of a stream tell everything so far, not what is new, as they do there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.answers.logprobs import finite, rows
from gateway.api.answers.streaming import DONE
from gateway.api.requests.fields import Biases, Count, Flag, Items, Number, few
from gateway.api.requests.grammars import grammar_of
from gateway.api.requests.schemas import biases
from gateway.orchestration.generation import Generation, Part, merged
from gateway.orchestration.generator import Generator
from gateway.orchestration.sampling_defaults import SamplingDefaults
from gateway.sessions.request import GenerationRequest
from gateway.text.pieces import Pieces
from outrider.errors import InvalidRequest
from outrider.serving.messages import MAX_LOGPROBS
from outrider.speculation.proposal import FinishReason, Logprobs

DEFAULT_TOKENS = 128  # new tokens where nothing is said, as in SGLang
MAX_GENERATIONS = 1024

# Fields that are not supported, and the values with which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "input_embeds": (None,),
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
    "lora_path": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "token_ids_logprob": (None,),
    "return_hidden_states": (None, False),
}


class NativeSampling(BaseModel):
    """`sampling_params` of /generate."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: Count | None = Field(DEFAULT_TOKENS, ge=0)
    min_new_tokens: Count = Field(0, ge=0)
    temperature: Number | None = Field(None, ge=0)
    top_p: Number | None = None
    top_k: Count | None = Field(None, ge=-1)
    min_p: Number | None = None
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    repetition_penalty: Number | None = None
    logit_bias: Biases | None = None
    sampling_seed: Count | None = Field(None, ge=-(2**63), lt=2**64)
    n: Count = Field(1, ge=1, le=128)
    stop: str | Items[str] | None = None
    stop_token_ids: Items[Count] | None = None
    ignore_eos: Flag = False
    no_stop_trim: Flag = False
    skip_special_tokens: Flag = True
    spaces_between_special_tokens: Flag = True
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    # Not supported; clients that send every field send these as null.
    stop_regex: None = None
    structural_tag: None = None
    custom_params: None = None
    stream_interval: Count | None = None  # tokens between events, which come with every commit here


Sampling = Annotated[NativeSampling, few(64)]


class NativeBody(BaseModel):
    """POST /generate. Where there are several prompts, the other fields may be lists of as many entries."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    text: str | Items[str] | None = None
    input_ids: Items[Count] | Items[Items[Count]] | None = None
    sampling_params: Sampling | Annotated[Items[Sampling], Field(max_length=MAX_GENERATIONS)] | None = None
    rid: str | Items[str] | None = None
    return_logprob: Flag | Items[Flag] | None = None
    logprob_start_len: Count | Items[Count] | None = None
    top_logprobs_num: Count | Items[Count] | None = None
    return_text_in_logprobs: Flag = False
    stream: Flag = False
    priority: Count | None = Field(None, gt=-(2**31), lt=2**31)  # whose negative is told to the target, in 32 bits

    def check_supported(self) -> None:
        """Raise InvalidRequest for a field that is not supported and not neutral."""
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise InvalidRequest(f"`{name}` is not supported by this server; leave it out", param=name)

    @property
    def several(self) -> bool:
        """True if the answer is a list, whatever `n` says."""
        given = self.text if self.text is not None else self.input_ids
        return isinstance(given, list) and (not given or isinstance(given[0], list | str))

    @property
    def prompt_field(self) -> str:
        """What the prompts came as."""
        return "text" if self.text is not None else "input_ids"

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as token ids. Raises InvalidRequest unless they are given, once, and few."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("send either `text` or `input_ids`", param="text")
        given: Any = self.text if self.text is not None else self.input_ids
        prompts = list(given) if self.several else [given]
        if not prompts:
            raise InvalidRequest("the prompt is empty", param=self.prompt_field)
        if (count := self._answers(len(prompts))) > MAX_GENERATIONS:
            raise InvalidRequest(f"prompts times n must be at most {MAX_GENERATIONS}, not {count}", param="n")
        return prompts

    def _answers(self, prompts: int) -> int:
        """How many answers are asked for of so many prompts; each has one at least."""
        given = self.sampling_params
        if isinstance(given, list):
            return max(prompts, sum(one.n for one in given))
        return prompts if given is None else prompts * given.n


@dataclass
class Told:
    """What one answer told so far. start: place in the prompt whose log-probabilities are told first; None is none."""

    id: str
    request: GenerationRequest
    start: int | None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    last: Part | None = None


def wanted(
    body: NativeBody, prompts: Sequence[list[int]], request_id: str, timeout: float | None, defaults: SamplingDefaults
) -> list[Told]:
    """The answers that a request asks for, prompt by prompt. defaults: of what it leaves out. Raises InvalidRequest."""
    answers: list[Told] = []
    for index, prompt in enumerate(prompts):
        count = len(prompts)
        given = _of(body.sampling_params, index, count, "sampling_params") or NativeSampling.model_validate({})
        own = _of(body.rid, index, count, "rid")
        told = bool(_of(body.return_logprob, index, count, "return_logprob"))
        start = _of(body.logprob_start_len, index, count, "logprob_start_len")
        top = (_of(body.top_logprobs_num, index, count, "top_logprobs_num") or 0) if told else None
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequest(f"top_logprobs_num must lie in [0, {MAX_LOGPROBS}]", param="top_logprobs_num")
        first = start if told and start is not None and start >= 0 else None
        if first is not None and first >= len(prompt):
            raise InvalidRequest(
                f"logprob_start_len must be less than the prompt's {len(prompt)} tokens", param="logprob_start_len"
            )
        name = own or (request_id if count == 1 else f"{request_id}-{index}")
        request = _request(body, given, prompt, top, None if first is None else top, timeout, defaults)
        for choice, one in enumerate(request.choices(given.n)):
            answers.append(Told(name if given.n == 1 else f"{name}-{choice}", one, first))
    return answers


def _of(value: Any, index: int, count: int, name: str) -> Any:
    """A field's value for one prompt."""
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise InvalidRequest(f"`{name}` has {len(value)} entries for {count} prompts", param=name)
    return value[index]


def _request(
    body: NativeBody,
    given: NativeSampling,
    prompt: list[int],
    top: int | None,
    prompt_top: int | None,
    timeout: float | None,
    defaults: SamplingDefaults,
) -> GenerationRequest:
    sampling = defaults.sampling(
        given.temperature,
        given.top_k,
        given.top_p,
        given.min_p,
        given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=biases(given.logit_bias),
    )
    stops = (given.stop,) if isinstance(given.stop, str) else tuple(given.stop or ())
    return GenerationRequest(
        prompt,
        sampling,
        given.max_new_tokens,
        clamp=given.max_new_tokens is None or "max_new_tokens" not in given.model_fields_set,
        min_tokens=given.min_new_tokens,
        seed=given.sampling_seed,
        stops=stops,
        stop_token_ids=tuple(given.stop_token_ids or ()),
        ignore_eos=given.ignore_eos,
        grammar=grammar_of(given.model_dump(include={"json_schema", "regex", "ebnf"})),
        logprobs=top,
        prompt_logprobs=prompt_top,
        include_stop=given.no_stop_trim,
        verbatim=not given.skip_special_tokens,
        timeout=timeout,
        prompt_field=body.prompt_field,
        # There higher numbers go first.
        priority=-(body.priority or 0),
    )


class NativeReply:
    """The answers to one /generate."""

    def __init__(self, answers: Sequence[Told], pieces: Pieces, *, several: bool, texts: bool) -> None:
        """several: they are told as a list. texts: log-probabilities name their tokens."""
        self._answers = answers
        self._pieces = pieces
        self._several = several or len(answers) > 1
        self._texts = texts
        self._generations: list[Generation] = []

    async def start(self, generator: Generator) -> None:
        """Open a session for each answer. Raises InvalidRequest, Unavailable."""
        async for generation in generator.start_all([(answer.request, answer.id) for answer in self._answers]):
            self._generations.append(generation)

    def close(self) -> None:
        """Free the sessions."""
        for generation in self._generations:
            generation.close()

    async def whole(self) -> bytes:
        """All answers."""
        async for index, part in merged(self._generations):
            self._take(self._answers[index], part)
        bodies = [self._body(answer) for answer in self._answers]
        return orjson.dumps(bodies if self._several else bodies[0])

    async def events(self) -> AsyncIterator[bytes]:
        """An event for each commit, up to [DONE]. Raises the error that ends it."""
        async for index, part in merged(self._generations):
            answer = self._answers[index]
            self._take(answer, part)
            body = self._body(answer) | ({"index": index} if self._several else {})
            yield b"data: " + orjson.dumps(body) + b"\n\n"
        yield DONE

    def _take(self, answer: Told, part: Part) -> None:
        if answer.start is not None and answer.last is None:
            self._tell_prompt(answer, answer.start, part.prompt_logprobs)
        if part.logprobs is not None:
            self._tell(answer, "output", part.tokens, part.logprobs)
        answer.text += part.text
        answer.tokens += part.tokens
        answer.last = part

    def _tell_prompt(self, answer: Told, start: int, told: Logprobs | None) -> None:
        """From one place on; there is no log-probability of the first token that is told of."""
        prompt = list(answer.request.prompt)
        answer.logprobs["input_token_logprobs"] = [self._entry(prompt[start], None)]
        if answer.request.prompt_logprobs:
            answer.logprobs["input_top_logprobs"] = [None]
        if told is not None:
            self._tell(answer, "input", prompt[1:], told, skip=start)

    def _tell(self, answer: Told, side: str, tokens: Sequence[int], told: Logprobs, skip: int = 0) -> None:
        own = answer.logprobs.setdefault(f"{side}_token_logprobs", [])
        for token, logprob, top in rows(tokens, told)[skip:]:
            own.append(self._entry(token, logprob))
            if answer.request.logprobs:
                best = answer.logprobs.setdefault(f"{side}_top_logprobs", [])
                best.append([self._entry(other, value) for other, value in top])

    def _entry(self, token: int, logprob: float | None) -> list[Any]:
        value = None if logprob is None else finite(logprob)
        return [value, token, self._pieces.text(token) if self._texts else None]

    def _body(self, answer: Told) -> dict[str, Any]:
        part = answer.last
        assert part is not None, "an answer that is told has begun"
        info: dict[str, Any] = {
            "id": answer.id,
            "finish_reason": _finish(part),
            "prompt_tokens": part.prompt_tokens,
            "completion_tokens": part.completion_tokens,
            "cached_tokens": part.cached_tokens,
            "weight_version": part.weight_version,
            "sampling_seed": part.seed,
        }
        if answer.request.logprobs is not None:
            info |= {"input_token_logprobs": [], "output_token_logprobs": [], **answer.logprobs}
        if part.report is not None:
            info |= {"e2e_latency": part.report.first_seconds + part.report.decode_seconds, **part.report.meta_info()}
        return {"text": answer.text, "output_ids": answer.tokens, "meta_info": info}


def _finish(part: Part) -> dict[str, Any] | None:
    match part.finish:
        case FinishReason.STOP:
            return {"type": "stop", "matched": part.matched}
        case FinishReason.LENGTH:
            return {"type": "length", "length": part.completion_tokens}
        case FinishReason.ABORT:
            return {"type": "abort", "message": "the request was aborted"}
    return None
