"""What crosses the border of an engine: messages in, step outputs out. Plain data, one object a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidRequest, OutriderError
from outrider.serving.features import FeatureBlock
from outrider.speculation.proposal import Commit, Proposal
from outrider.speculation.sampling import SamplingParams, StopConditions

MAX_LOGPROBS = 20  # as OpenAI has it
_MAX_PROMPT_LOGPROB_BYTES = 48 << 20  # of a prompt's log-probabilities, which come in one frame
_LOGPROB_BYTES, _TOP_LOGPROB_BYTES = 4, 8  # of a token, and of one of the likeliest beside it
MAX_GRAMMAR_LENGTH = 1 << 17  # characters


class GrammarKind(IntEnum):
    """What a grammar is written in. The numbers are those of the wire."""

    JSON_SCHEMA = 1
    REGEX = 2
    EBNF = 3

    @property
    def param(self) -> str:
        """Name of a request's field that has one."""
        return self.name.lower()


@dataclass(frozen=True)
class Grammar:
    """What a session's text must match as a whole. Raises InvalidRequest if it is too long.

    text: a JSON schema; a regular expression; or a grammar in Lark's or in GBNF's notation
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_LENGTH:
            raise InvalidRequest(
                f"a grammar of {len(self.text)} characters is too long; {MAX_GRAMMAR_LENGTH} are allowed",
                param=self.kind.param,
            )


@dataclass(frozen=True)
class OpenSession:
    """Opens a session. tokens: [n] uint32, the prompt and then what is already committed; n >= prompt_length >= 1.

    cache_salt: only sessions of the same salt share pages of the prefix cache
    grammar: what the text must match; it then ends with an end-of-sequence token, ignore_eos or not
    logprobs, prompt_logprobs: log-probabilities are told of new tokens and of the prompt's, and of this many of the
        likeliest tokens beside each; None tells none. A session with committed tokens has been told its prompt's.
    feature_spec: id of the FeatureSpec whose hidden states are wanted from position `features_from` on; 0 for none
    drafting_paused: a draft need not work for it before a commit says that hints are wanted
    priority: of sessions that wait, those with a lower number are admitted first
    max_draft_tokens: draft nodes that a step may verify; None is as many as pay, 0 plain decoding
    traceparent: W3C trace context of the request that wants its spans; empty for none
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

    def validate(self, vocab_size: int, max_tokens: int) -> None:
        """Raise InvalidRequest unless the tokens are known and leave room for one more among max_tokens."""
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
                raise InvalidRequest(f"at most {MAX_LOGPROBS} logprobs a token can be told", param=name)
        if len(self.tokens) >= max_tokens:
            raise InvalidRequest(
                f"the prompt has {len(self.tokens)} tokens, and the model's context of {max_tokens} leaves no room "
                "for an answer; shorten it",
                param="prompt",
            )
        fitting = (_MAX_PROMPT_LOGPROB_BYTES // self.prompt_length - _LOGPROB_BYTES) // _TOP_LOGPROB_BYTES
        if (self.prompt_logprobs or 0) > fitting:
            raise InvalidRequest(
                f"log-probabilities of {self.prompt_length} prompt tokens and {self.prompt_logprobs} beside each are "
                f"more than can be sent; ask for at most {max(fitting, 0)}",
                param="prompt_logprobs",
            )


@dataclass(frozen=True)
class SessionFailure:
    """An error that ends one session."""

    session_id: int
    error: OutriderError


@dataclass(frozen=True)
class DrafterStats:
    """What a drafter promised and what came of it, since the start. Fields as in the wire's DrafterStats."""

    name: str
    offered: int
    promised: float
    accepted: int
    chances: int = 0


@dataclass(frozen=True)
class OnlineStats:
    """What a draft has learnt while serving, since the start. Fields as in the wire's OnlineStats."""

    steps: int = 0
    rows: int = 0
    kept: int = 0
    rejected: int = 0
    accept_length_before: float = 0.0
    accept_length_after: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class DraftStats:
    """What became of the draft tokens that a target received, since its start. Fields as in the wire's DraftStats."""

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
    """State of an engine after a step. Fields as in the wire's EngineLoad."""

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
    """What one step of an engine says: commits (target) or proposals (draft), and the sessions that failed.

    urgent: False if nobody waits for it but clients who read along; then it may be told with what comes next
    steps: that it took, if the engine takes several at once
    """

    commits: list[Commit] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    failures: list[SessionFailure] = field(default_factory=list)
    load: EngineLoad = field(default_factory=EngineLoad)
    features: list[FeatureBlock] = field(default_factory=list)
    urgent: bool = True
    steps: int = 1

    def extend(self, later: StepOutput) -> None:
        """Add what a later step says. Its load takes the place of this one's; both must be of the same weights."""
        self.commits += later.commits
        self.proposals += later.proposals
        self.failures += later.failures
        self.features += later.features
        self.steps += later.steps
        self.load = later.load
        self.urgent = self.urgent or later.urgent

    @property
    def has_output(self) -> bool:
        """True if there is anything to tell but the load."""
        return bool(self.commits or self.proposals or self.failures or self.features)


@dataclass(frozen=True)
class Message:
    """One frame of a peer, decoded."""

    opens: Sequence[OpenSession] = ()
    proposals: Sequence[Proposal] = ()
    commits: Sequence[Commit] = ()
    closes: Sequence[int] = ()
    features: Sequence[FeatureBlock] = ()
