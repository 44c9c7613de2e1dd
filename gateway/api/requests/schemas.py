"""Bodies of OpenAI's /v1/completions and /v1/chat/completions. Unknown fields are ignored.

An unsupported field that would change the text is refused by name, never ignored.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from gateway.api.requests.fields import BOUNDED, Biases, Count, Flag, Items, Number
from gateway.api.requests.grammars import grammar_of
from gateway.api.requests.messages import Message, conversation_options
from gateway.api.requests.speculation import SpeculationField, reports_steps, speculation_of
from gateway.api.requests.tools import Tools, tools_of
from gateway.orchestration.sampling_defaults import SamplingDefaults
from gateway.sessions.request import PROMPT, GenerationRequest, StopOptions, TextOptions
from gateway.text import encoding
from outrider.errors import InvalidRequest
from outrider.serving.messages import MAX_LOGPROBS, Grammar

MAX_CHOICES = 128  # OpenAI's limit
MAX_GENERATIONS = 128  # of all prompts of a request
COMPLETION_TOKENS = 16  # default max_tokens of /v1/completions, as in OpenAI's API

# Unsupported fields, and their values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "guided_decoding_backend": (None,),
    "structural_tag": (None,),
    "tools": (None, []),
    "functions": (None, []),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "use_beam_search": (None, False),
    "truncation_side": (None, "left"),
    "suffix": (None, ""),
    "echo": (None, False),
    "add_special_tokens": (None, False),
    "chat_template": (None,),
    "documents": (None, []),
    "stop_regex": (None, [], ""),
    "prompt_embeds": (None,),
    "input_embeds": (None,),
    "lora_path": (None,),
    "logits_processors": (None, []),
    "custom_logit_processor": (None,),
    "thinking_token_budget": (None,),
    "web_search_options": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
}


class StreamOptions(BaseModel):
    """Optional parts of a stream. continuous_usage_stats: the usage in every chunk."""

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None


class GenerationBody(BaseModel):
    """Fields that all request bodies share."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    prompt_field: ClassVar[str] = PROMPT

    model: str | None = None
    max_tokens: Count | None = Field(None, ge=1)
    min_tokens: Count | None = Field(None, ge=0)
    temperature: Number | None = Field(None, ge=0, le=2)
    top_p: Number | None = None
    top_k: Count | None = Field(None, ge=-1)
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Biases | None = None
    prompt_logprobs: Count | None = Field(None, ge=0, le=MAX_LOGPROBS)
    seed: Count | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | Items[str] | None = None
    stop_token_ids: Items[Count] | None = None
    ignore_eos: Flag = False
    include_stop_str_in_output: Flag | None = None
    no_stop_trim: Flag | None = None
    skip_special_tokens: Flag | None = None
    truncate_prompt_tokens: Count | None = Field(None, ge=-1)
    priority: Count | None = Field(None, ge=-(2**31), lt=2**31)
    timeout: Number | None = Field(None, gt=0)
    speculation: SpeculationField | None = None
    rid: str | None = Field(None, min_length=1, max_length=128)
    request_id: str | None = Field(None, min_length=1, max_length=128)
    cache_salt: str | None = None
    n: Count | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: Count | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag | None = None

    @property
    def choices(self) -> int:
        """Number of choices per prompt."""
        return self.n or 1

    @property
    def candidates(self) -> int:
        """Number of generations per prompt, of which the likeliest are returned as choices."""
        return max(self.choices, self.best_of or 1)

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if every chunk of a stream has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def reports_steps(self) -> bool:
        """True if the answer has statistics of every step."""
        return reports_steps(self.speculation)

    def cut(self, prompt: list[int], context: int) -> list[int]:
        """The requested part of a prompt: its last tokens. Raises InvalidRequest.

        context: tokens of prompt and answer together
        """
        return encoding.cut(prompt, self.truncate_prompt_tokens, context - (self.max_new_tokens() or 1))

    def check_supported(self) -> None:
        """Raise InvalidRequest for an unsupported field whose value is not neutral."""
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise InvalidRequest(f"`{name}` is not supported by this server; leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("`stream_options` is allowed only where `stream` is true", param="stream_options")
        if self.best_of is not None and self.best_of < self.choices:
            raise InvalidRequest("`best_of` must not be smaller than `n`", param="best_of")
        if self.candidates > self.choices and self.stream:
            message = "`best_of` above `n` cannot be streamed: the best answers are known only at the end"
            raise InvalidRequest(message, param="best_of")

    @property
    def echoes(self) -> bool:
        """True if the answer begins with the prompt."""
        return False

    @property
    def new_text(self) -> bool:
        """True if the answer is a text of its own; False if it continues the prompt."""
        return False

    def top_logprobs_count(self) -> int | None:
        """Likeliest tokens to return for each new token; None for no log-probabilities."""
        return None

    def requested_max_tokens(self) -> int | None:
        """New tokens at most, by any of the field's names; None if omitted."""
        return self.max_tokens

    def max_new_tokens(self) -> int | None:
        """New tokens at most; None is the rest of the context."""
        return self.requested_max_tokens()

    def request(
        self, prompt: list[int], defaults: SamplingDefaults, timeout: float | None, *, verbatim: bool = False
    ) -> GenerationRequest:
        """The first generation of a prompt. Raises InvalidRequest.

        defaults: of omitted sampling parameters. timeout: in seconds, if the body has none
        verbatim: special tokens are part of the text, even if the body skips them
        """
        sampling = defaults.sampling(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=biases(self.logit_bias),
        )
        stop = StopOptions(
            self.max_new_tokens(),
            clamp=self.requested_max_tokens() is None,
            min_tokens=self.min_tokens or 0,
            strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            timeout=self.timeout or timeout,
        )
        text = TextOptions(
            include_stop=bool(self.include_stop_str_in_output or self.no_stop_trim),
            verbatim=verbatim or self.skip_special_tokens is False,
            new_text=self.new_text,
        )
        return GenerationRequest(
            prompt,
            sampling,
            stop,
            text,
            seed=self.seed,
            cache_salt=self.cache_salt or "",
            grammar=self.grammar(),
            logprobs=self.top_logprobs_count(),
            prompt_logprobs=self._prompt_logprobs_count(),
            priority=self.priority or 0,
            **speculation_of(self.speculation),
            watch_draft=self.reports_steps,
            prompt_field=self.prompt_field,
        )

    def grammar(self) -> Grammar | None:
        """The grammar of the answer. Raises InvalidRequest."""
        return grammar_of(self.model_extra or {})

    def _prompt_logprobs_count(self) -> int | None:
        echoed = self.top_logprobs_count() if self.echoes else None
        return max((n for n in (self.prompt_logprobs, echoed) if n is not None), default=None)


def biases(given: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and logit bias. Raises InvalidRequest."""
    return tuple((_token_id(key), bias) for key, bias in (given or {}).items())


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise InvalidRequest(f'logit_bias: "{key}" is no token id', param="logit_bias")
    return int(key)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | Items[str] | Items[Count] | Items[Items[Count]]
    max_tokens: Count | None = Field(None, ge=0)
    logprobs: Count | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: Flag | None = None
    add_special_tokens: Flag | None = None

    def check_supported(self) -> None:
        """As in GenerationBody."""
        super().check_supported()
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            message = "`max_tokens` must be 1 or more, unless `echo` or `prompt_logprobs` is set"
            raise InvalidRequest(message, param="max_tokens")

    @property
    def echoes(self) -> bool:
        """As in GenerationBody."""
        return bool(self.echo)

    def top_logprobs_count(self) -> int | None:
        """As in GenerationBody."""
        return self.logprobs

    def max_new_tokens(self) -> int | None:
        """As in GenerationBody, with OpenAI's short default."""
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as token ids. Raises InvalidRequest if there are none or too many."""
        prompt: Any = self.prompt
        prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
        if not prompts:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if (count := len(prompts) * self.candidates) > MAX_GENERATIONS:
            raise InvalidRequest(f"prompts times n must be at most {MAX_GENERATIONS}, not {count}", param="prompt")
        return prompts


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    prompt_field = "messages"

    messages: Annotated[Items[Message], BOUNDED] = Field(min_length=1)
    max_completion_tokens: Count | None = Field(None, ge=1)
    logprobs: Flag | None = None
    top_logprobs: Count | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Items[dict[str, Any]] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    reasoning_effort: str | None = None
    separate_reasoning: Flag | None = None
    include_reasoning: Flag | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None

    def template_options(self) -> dict[str, Any]:
        """Variables of the chat template besides the messages. Raises InvalidRequest."""
        options = conversation_options(
            self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs
        )
        named = {"reasoning_effort": self.reasoning_effort, "documents": self.documents}
        return {name: value for name, value in named.items() if value is not None} | options

    @cached_property
    def offered(self) -> Tools | None:
        """The tools that the model may call. Raises InvalidRequest."""
        return tools_of(self.tools, self.tool_choice, self.parallel_tool_calls)

    def grammar(self) -> Grammar | None:
        """As in GenerationBody; a forced call has a grammar of its own."""
        tools, own = self.offered, super().grammar()
        forced = tools.grammar() if tools is not None else None
        if forced is not None and own is not None:
            raise InvalidRequest("a forced call and another grammar exclude one another", param="tool_choice")
        return forced or own

    def top_logprobs_count(self) -> int | None:
        """As in GenerationBody. Raises InvalidRequest for `top_logprobs` without `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`top_logprobs` is allowed only where `logprobs` is true", param="top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def new_text(self) -> bool:
        """As in GenerationBody."""
        return not self.continue_final_message

    def requested_max_tokens(self) -> int | None:
        """As in GenerationBody; `max_completion_tokens` precedes `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
