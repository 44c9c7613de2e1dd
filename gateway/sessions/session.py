"""A session as the gateway owns it: specification, tokens, the replicas on which it is open, and statistics."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from gateway.sessions.draft_watch import DraftWatch
from gateway.sessions.inbox import Inbox, InTurn
from gateway.sessions.prefixes import PrefixHashes
from gateway.sessions.recovery import Failures, Reopening
from gateway.sessions.request import GenerationRequest
from gateway.sessions.step_stats import PLAIN_STEP, SourceCounts, StepStats, add_counts
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from outrider.serving.messages import OpenSession
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.proposal import FinishReason, Logprobs


def _at_once(work: Callable[[], object]) -> None:
    work()


class SessionStats:
    """Counts and times of a session. Times are those of time.perf_counter, in seconds."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.verified = 0
        self.accepted = 0
        self.sources: SourceCounts = {}
        self.cached_tokens = 0  # prompt tokens found in the first target's prefix cache
        self.weight_version = ""  # of the last commit; before the first one, of the admission
        self.opened_at = self.first_at = self.committed_at = time.perf_counter()


class Session:
    """One generation in the services.

    target, draft: the links on which it is open; None while it waits for one
    drained_from: a draining target that had it before, until the present one commits a token: it takes the session back
        if no other has room
    features_end: hidden states of positions before it have been sent to the draft service
    """

    def __init__(self, session_id: int, request: GenerationRequest, in_turn: InTurn = _at_once) -> None:
        """request: resolved, with max_tokens and a seed; its prompt has at least one token. in_turn: for its client."""
        self.id = session_id
        self.request = request
        self.prompt_length = len(request.prompt)
        self.tokens: list[int] = list(request.prompt)
        self.target: TargetLink | None = None
        self.draft: DraftLink | None = None
        self.drained_from: TargetLink | None = None
        self.features_end = 0
        self.stats = SessionStats()
        self.inbox = Inbox(self.stats.steps, in_turn)
        self.failures = Failures()
        self.reopening = Reopening()
        self.prefix_hashes = PrefixHashes(request.cache_salt)
        self.watch = DraftWatch(request.prompt) if request.watch_draft else None

    @property
    def new_tokens(self) -> int:
        """Tokens committed after the prompt."""
        return len(self.tokens) - self.prompt_length

    def open_message(self, feature_spec: int = 0) -> OpenSession:
        """The message that opens the session, the first time or again: prompt and committed tokens.

        feature_spec: id of the hidden states that the draft service needs; 0 for none
        """
        request = self.request
        return OpenSession(
            self.id,
            np.array(self.tokens, dtype=np.uint32),
            self.prompt_length,
            request.sampling,
            request.stop.conditions,
            request.cache_salt,
            request.grammar,
            request.logprobs,
            request.prompt_logprobs,
            feature_spec=feature_spec,
            features_from=self.features_end if feature_spec else 0,
            priority=request.priority,
            max_draft_tokens=request.max_draft_tokens,
            draft_sources=request.draft_sources,
            traceparent=request.traceparent,
            caller=request.caller,
            scaled_logprobs=request.scaled_logprobs,
        )

    def commit(
        self,
        tokens: list[int],
        verified: int,
        accepted: int,
        finish: FinishReason,
        logprobs: Logprobs | None = None,
        source: int = 0,
    ) -> None:
        """Append what one step committed, or several plain steps, and wake the client's coroutine.

        source: SourceKind of the verified draft tokens
        """
        self.tokens += tokens
        if self.reopening.active:
            self.reopening.append(tokens)
        stats = self.stats
        if tokens:
            self.failures.losses = 0
            self.drained_from = None
            draft = self.watch.commit(tokens, drafted=source == SourceKind.DRAFT) if self.watch is not None else ()
            if verified:
                stats.steps.append(StepStats(len(tokens), verified, accepted, draft, source))
            else:
                stats.steps += [PLAIN_STEP] * len(tokens)
        if verified:
            stats.verified += verified
            stats.accepted += accepted
            add_counts(stats.sources, source, verified, accepted)
        self.inbox.put(tokens, finish, logprobs)
