"""The specification of a generation: filled once at the edge, resolved once by the generator, held by the session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.serving.messages import Grammar
from outrider.speculation.draft_source import ALL_SOURCES, SourceKind
from outrider.speculation.sampling import SamplingParams, StopConditions

PROMPT = "prompt"  # the services' name of the prompt in errors


@dataclass(frozen=True)
class StopOptions:
    """When a generation ends.

    max_tokens: new tokens at most; None is the rest of the context, 0 returns the prompt's log-probabilities only
    clamp: a max_tokens beyond the context is reduced instead of refused
    min_tokens: new tokens before which neither a stop token nor a stop string ends it
    strings, token_ids: stop strings and stop tokens
    timeout: seconds after which it ends with DeadlineExceeded; None is no limit
    """

    max_tokens: int | None = None
    clamp: bool = False
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    timeout: float | None = None

    @property
    def conditions(self) -> StopConditions:
        """The part that the services check. Valid once max_tokens is resolved. Raises InvalidRequest."""
        assert self.max_tokens is not None, "the generator resolves max_tokens"
        return StopConditions(max(self.max_tokens, 1), self.min_tokens, self.token_ids, self.ignore_eos)


@dataclass(frozen=True)
class TextOptions:
    """How tokens become text.

    include_stop: the text ends with the stop string or stop token that ended it
    verbatim: special tokens are part of the text
    new_text: the answer is a text of its own, as in a chat; otherwise it continues the prompt
    """

    include_stop: bool = False
    verbatim: bool = False
    new_text: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """One generation, after the edge's own checks.

    seed: None draws one; numbers below 0 count from the end of 64 bits
    cache_salt, grammar, logprobs, prompt_logprobs, scaled_logprobs, priority, max_draft_tokens, draft_sources,
    traceparent, caller: as in OpenSession
    watch_draft: step statistics include the draft tokens that the draft service scored highest
    counted: False keeps the generation out of metrics and logs, as for probes
    prompt_field: the client's name of the prompt, for errors
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    stop: StopOptions = field(default_factory=StopOptions)
    text: TextOptions = field(default_factory=TextOptions)
    seed: int | None = None
    cache_salt: str = ""
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    scaled_logprobs: bool = False
    priority: int = 0
    max_draft_tokens: int | None = None
    draft_sources: frozenset[SourceKind] = ALL_SOURCES
    traceparent: str = ""
    caller: str = ""
    watch_draft: bool = False
    counted: bool = True
    prompt_field: str = PROMPT

    @property
    def prompt_only(self) -> bool:
        """True if no new token is returned. The services still generate one, because a session has at least one."""
        return self.stop.max_tokens == 0

    @property
    def uses_draft_service(self) -> bool:
        """True if the draft service may draft for it."""
        return self.max_draft_tokens != 0 and SourceKind.DRAFT in self.draft_sources

    def client_field(self, param: str | None) -> str | None:
        """The client's name of a field that the services name in an error."""
        if param == PROMPT:
            return self.prompt_field
        grammar = self.grammar
        return grammar.client_field or param if grammar is not None and param == grammar.kind.param else param

    def choices(self, count: int) -> list[GenerationRequest]:
        """This request once for each choice, with consecutive seeds."""
        seed = self.seed
        return [replace(self, seed=None if seed is None else seed + choice) for choice in range(count)]
