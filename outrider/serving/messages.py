"""Messages to an engine and outputs of its steps, as plain data with one object for each session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidRequest, OutriderError
from outrider.serving.features import FeatureBlock
from outrider.speculation.draft_source import ALL_SOURCES, SourceKind
from outrider.speculation.proposal import Commit, Proposal
from outrider.speculation.sampling import SamplingParams, StopConditions

MAX_LOGPROBS = 20  # OpenAI's limit
_MAX_PROMPT_LOGPROB_BYTES = 48 << 20  # of a prompt's log-probabilities, which are sent in one frame
_LOGPROB_BYTES, _TOP_LOGPROB_BYTES = 4, 8  # of a token, and of one of its most likely alternatives
MAX_GRAMMAR_LENGTH = 1 << 17  # characters
_END_OF_CALLER = "\x1f"  # between the caller and the request's own salt in a cache salt


def cache_salt_of(caller: str, own: str) -> str:
    """The cache salt of a session. caller: whose sessions share caches, or empty; own: salt of the request."""
    return f"{caller}{_END_OF_CALLER}{own}" if caller else own


def own_salt(cache_salt: str) -> str:
    """The request's own part of a cache salt, by which a client isolates its session from others of the same caller."""
    return cache_salt.rpartition(_END_OF_CALLER)[2]


class GrammarKind(IntEnum):
    """Language of a grammar. Values as in the protocol."""

    JSON_SCHEMA = 1
    REGEX = 2
    EBNF = 3

    @property
    def param(self) -> str:
        """Name of the request field for a grammar of this kind."""
        return self.name.lower()


@dataclass(frozen=True)
class Grammar:
    """A grammar that a session's text must match as a whole. Raises InvalidRequest if it is too long.

    text: a JSON schema, a regular expression, or a grammar in Lark's or GBNF's notation
    client_field: the client's name of it, for errors; it does not go over the wire, where it has the name of its kind
    """

    kind: GrammarKind
    text: str
    client_field: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_LENGTH:
            raise InvalidRequest(
                f"a grammar of {len(self.text)} characters is too long; {MAX_GRAMMAR_LENGTH} are allowed",
                param=self.client_field or self.kind.param,
            )


@dataclass(frozen=True)
class OpenSession:
    """Opens a session. tokens: [n] uint32, the prompt followed by the committed tokens; n >= prompt_length >= 1.

    cache_salt: only sessions with equal salts share pages of the prefix cache and stored n-grams (cache_salt_of)
    grammar: grammar of the text, which then ends with an end-of-sequence token, also with ignore_eos
    logprobs, prompt_logprobs: number of most likely tokens reported with the log-probability of each new token, and of
        each prompt token; None reports none. Those of the prompt are reported only without committed tokens.
    scaled_logprobs: those of new tokens are at the sampling temperature; else at temperature 1, as those of the prompt
    feature_spec: id of the FeatureSpec whose hidden states are sent from position `features_from` on; 0 for none
    drafting_paused: True if drafting is paused until a commit has a draft budget
    priority: waiting sessions with lower numbers are admitted first
    max_draft_tokens: maximum draft tokens that a step verifies; None is as many as is profitable, 0 plain decoding
    traceparent: W3C trace context of the request, the parent of the session's spans; empty for no spans
    draft_sources: those that may draft, at least one
    caller: callers take turns at admission, in prompt chunks and when grammars are compiled
    """

    session_id: int
    tokens: NDArray[np.uint32]
    prompt_length: int
    sampling: SamplingParams
    stop: StopConditions
    cache_salt: str = ""
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    feature_spec: int = 0
    features_from: int = 0
    drafting_paused: bool = False
    priority: int = 0
    max_draft_tokens: int | None = None
    traceparent: str = ""
    draft_sources: frozenset[SourceKind] = ALL_SOURCES
    caller: str = ""
    scaled_logprobs: bool = False

    def validate(self, vocab_size: int, max_tokens: int) -> None:
        """Raise InvalidRequest unless all tokens are in the vocabulary and fewer than max_tokens."""
        if not 1 <= self.prompt_length <= len(self.tokens):
            raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
        if int(self.tokens.max()) >= vocab_size:
            raise InvalidRequest(
                f"token id {int(self.tokens.max())} is not in the vocabulary of {vocab_size} tokens",
                param="prompt",
            )
        biased = max((token for token, _ in self.sampling.logit_bias), default=0)
        if biased >= vocab_size:
            raise InvalidRequest(
                f"logit_bias: token id {biased} is not in the vocabulary of {vocab_size} tokens", param="logit_bias"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if not 0 <= (getattr(self, name) or 0) <= MAX_LOGPROBS:
                raise InvalidRequest(f"at most {MAX_LOGPROBS} logprobs per token can be returned", param=name)
        if len(self.tokens) >= max_tokens:
            raise InvalidRequest(
                f"the prompt has {len(self.tokens)} tokens, and the model's context of {max_tokens} leaves no room "
                "for an answer; shorten it",
                param="prompt",
            )
        fitting = (_MAX_PROMPT_LOGPROB_BYTES // self.prompt_length - _LOGPROB_BYTES) // _TOP_LOGPROB_BYTES
        if (self.prompt_logprobs or 0) > fitting:
            raise InvalidRequest(
                f"{self.prompt_logprobs} log-probabilities for each of {self.prompt_length} prompt tokens are too many "
                f"for one frame; ask for at most {max(fitting, 0)}",
                param="prompt_logprobs",
            )


@dataclass(frozen=True)
class SessionFailure:
    """An error that ends one session."""

    session_id: int
    error: OutriderError


@dataclass(frozen=True)
class DrafterStats:
    """Draft tokens of a drafter and their acceptance since its start. Fields as in the protocol's DrafterStats."""

    name: str
    offered: int
    promised: float
    accepted: int
    chances: int = 0


@dataclass(frozen=True)
class OnlineStats:
    """Progress of online learning since the start. Fields as in the protocol's OnlineStats."""

    steps: int = 0
    rows: int = 0
    kept: int = 0
    rejected: int = 0
    accept_length_before: float = 0.0
    accept_length_after: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class DraftStats:
    """Fate of the draft tokens that a target received. Fields as in the protocol's DraftStats."""

    received_tokens: int = 0
    unverified_tokens: int = 0
    steps_without_drafter: int = 0
    steps_paused: int = 0
    steps_late: int = 0
    steps_empty: int = 0
    steps_not_selected: int = 0
    lag_histogram: tuple[int, ...] = ()
    lag_tokens: int = 0


@dataclass(frozen=True)
class EngineLoad:
    """State of an engine after a step. Fields as in the protocol's EngineLoad."""

    running_sessions: int = 0
    waiting_sessions: int = 0
    free_pages: int = 0
    total_pages: int = 0
    step_microseconds: int = 0
    step_tokens: int = 0
    cached_pages: int = 0
    weight_version: str = ""
    preemptions: int = 0
    drafters: tuple[DrafterStats, ...] = ()
    drafting_paused: bool = False
    compilations: int = 0
    online: OnlineStats | None = None
    draft_stats: DraftStats | None = None
    paused: bool = False


@dataclass
class StepOutput:
    """Output of one step: commits (target) or proposals (draft service), and failed sessions.

    urgent: False if only clients that read a stream wait for it; such output may be coalesced with that of later steps
    steps: number of steps, if the engine took several at once
    """

    commits: list[Commit] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    failures: list[SessionFailure] = field(default_factory=list)
    load: EngineLoad = field(default_factory=EngineLoad)
    features: list[FeatureBlock] = field(default_factory=list)
    urgent: bool = True
    steps: int = 1

    def extend(self, later: StepOutput) -> None:
        """Add the output of a later step, whose load replaces this one's. Both must have the same weight_version."""
        self.commits += later.commits
        self.proposals += later.proposals
        self.failures += later.failures
        self.features += later.features
        self.steps += later.steps
        self.load = later.load
        self.urgent = self.urgent or later.urgent

    @property
    def has_output(self) -> bool:
        """True if there is output besides the load."""
        return bool(self.commits or self.proposals or self.failures or self.features)


@dataclass(frozen=True)
class Message:
    """One frame of a peer, decoded."""

    opens: Sequence[OpenSession] = ()
    proposals: Sequence[Proposal] = ()
    commits: Sequence[Commit] = ()
    closes: Sequence[int] = ()
    features: Sequence[FeatureBlock] = ()
