"""Bodies of SGLang's native POST /generate, and the generations that they request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from gateway.api.requests.fields import Biases, Count, Flag, Items, Number, few
from gateway.api.requests.grammars import grammar_of
from gateway.api.requests.schemas import biases
from gateway.api.requests.speculation import SpeculationField, reports_steps, speculation_of
from gateway.orchestration.sampling_defaults import SamplingDefaults
from gateway.sessions.request import GenerationRequest, StopOptions, TextOptions
from outrider.errors import InvalidRequest
from outrider.serving.messages import MAX_LOGPROBS

DEFAULT_TOKENS = 128  # max_new_tokens if omitted, as in SGLang
MAX_GENERATIONS = 1024

# Unsupported fields, and their values that change nothing.
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
    "return_routed_experts": (None, False),
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
    stream_interval: Count | None = None  # tokens between events; here each commit is an event


Sampling = Annotated[NativeSampling, few(64)]


class NativeBody(BaseModel):
    """POST /generate. With several prompts, the other fields may be lists of the same length."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    text: str | Items[str] | None = None
    input_ids: Items[Count] | Items[Items[Count]] | None = None
    sampling_params: Sampling | Annotated[Items[Sampling], Field(max_length=MAX_GENERATIONS)] | None = None
    rid: str | Items[str] | None = None
    cache_salt: str | None = None
    return_logprob: Flag | Items[Flag] | None = None
    logprob_start_len: Count | Items[Count] | None = None
    top_logprobs_num: Count | Items[Count] | None = None
    return_text_in_logprobs: Flag = False
    stream: Flag = False
    speculation: SpeculationField | Annotated[Items[SpeculationField], Field(max_length=MAX_GENERATIONS)] | None = None
    priority: Count | None = Field(None, gt=-(2**31), lt=2**31)  # the target gets its negative, in 32 bits

    def check_supported(self) -> None:
        """Raise InvalidRequest for an unsupported field whose value is not neutral."""
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise InvalidRequest(f"`{name}` is not supported by this server; leave it out", param=name)

    @property
    def several(self) -> bool:
        """True if the answer is a list because several prompts were sent."""
        given = self.text if self.text is not None else self.input_ids
        return isinstance(given, list) and (not given or isinstance(given[0], list | str))

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompts."""
        return "text" if self.text is not None else "input_ids"

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as token ids. Raises InvalidRequest if none, two kinds or too many are given."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("send either `text` or `input_ids`", param="text")
        given: Any = self.text if self.text is not None else self.input_ids
        prompts = list(given) if self.several else [given]
        if not prompts:
            raise InvalidRequest("the prompt is empty", param=self.prompt_field)
        if (count := self._generations(len(prompts))) > MAX_GENERATIONS:
            raise InvalidRequest(f"prompts times n must be at most {MAX_GENERATIONS}, not {count}", param="n")
        return prompts

    def _generations(self, prompts: int) -> int:
        """Number of generations for a number of prompts."""
        given = self.sampling_params
        if isinstance(given, list):
            return max(prompts, sum(one.n for one in given))
        return prompts if given is None else prompts * given.n


@dataclass(frozen=True)
class NativeRequest:
    """One generation of a /generate request.

    ids: of the generation, of its prompt and of the request, for aborts
    logprob_start: first position of the prompt whose log-probability is returned; None for none
    """

    ids: tuple[str, ...]
    request: GenerationRequest
    logprob_start: int | None

    @property
    def id(self) -> str:
        """In its answer."""
        return self.ids[0]


def native_requests(
    body: NativeBody, prompts: Sequence[list[int]], request_id: str, timeout: float | None, defaults: SamplingDefaults
) -> list[NativeRequest]:
    """The generations of a request, prompt by prompt. defaults: of sampling parameters. Raises InvalidRequest."""
    requests: list[NativeRequest] = []
    for index, prompt in enumerate(prompts):
        count = len(prompts)
        params = _of(body.sampling_params, index, count, "sampling_params") or NativeSampling.model_validate({})
        own_id = _of(body.rid, index, count, "rid")
        wants_logprobs = bool(_of(body.return_logprob, index, count, "return_logprob"))
        start = _of(body.logprob_start_len, index, count, "logprob_start_len")
        top = (_of(body.top_logprobs_num, index, count, "top_logprobs_num") or 0) if wants_logprobs else None
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequest(f"top_logprobs_num must lie in [0, {MAX_LOGPROBS}]", param="top_logprobs_num")
        first = start if wants_logprobs and start is not None and start >= 0 else None
        if first is not None and first >= len(prompt):
            raise InvalidRequest(
                f"logprob_start_len must be less than the prompt's {len(prompt)} tokens", param="logprob_start_len"
            )
        name = own_id or (request_id if count == 1 else f"{request_id}-{index}")
        speculation = _of(body.speculation, index, count, "speculation")
        if reports_steps(speculation):
            raise InvalidRequest("`speculation.report` is for chats and completions", param="speculation.report")
        request = _request(body, params, prompt, top, None if first is None else top, timeout, defaults)
        request = replace(request, **speculation_of(speculation))
        for choice, one in enumerate(request.choices(params.n)):
            own = name if params.n == 1 else f"{name}-{choice}"
            requests.append(NativeRequest((own, name, request_id), one, first))
    return requests


def _of(value: Any, index: int, count: int, name: str) -> Any:
    """A field's value for one of several prompts."""
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise InvalidRequest(f"`{name}` has {len(value)} entries for {count} prompts", param=name)
    return value[index]


def _request(
    body: NativeBody,
    params: NativeSampling,
    prompt: list[int],
    top: int | None,
    prompt_top: int | None,
    timeout: float | None,
    defaults: SamplingDefaults,
) -> GenerationRequest:
    sampling = defaults.sampling(
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=biases(params.logit_bias),
    )
    stop = StopOptions(
        params.max_new_tokens,
        clamp=params.max_new_tokens is None or "max_new_tokens" not in params.model_fields_set,
        min_tokens=params.min_new_tokens,
        strings=(params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ()),
        token_ids=tuple(params.stop_token_ids or ()),
        ignore_eos=params.ignore_eos,
        timeout=timeout,
    )
    return GenerationRequest(
        prompt,
        sampling,
        stop,
        TextOptions(include_stop=params.no_stop_trim, verbatim=not params.skip_special_tokens),
        seed=params.sampling_seed,
        cache_salt=body.cache_salt or "",
        grammar=grammar_of(params.model_dump(include={"json_schema", "regex", "ebnf"})),
        logprobs=top,
        prompt_logprobs=prompt_top,
        scaled_logprobs=True,
        priority=-(body.priority or 0),  # in SGLang higher numbers go first
        prompt_field=body.prompt_field,
    )
