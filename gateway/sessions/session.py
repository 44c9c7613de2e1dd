"""A session as the gateway owns it: specification, committed tokens, links, statistics, and the client's inbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gateway.sessions.draft_watch import DraftWatch
from gateway.sessions.inbox import Inbox
from gateway.sessions.prefixes import PrefixHashes
from gateway.sessions.recovery import Failures, Reopening
from gateway.sessions.request import GenerationRequest
from gateway.sessions.step_stats import SessionStats
from outrider.serving.messages import OpenSession
from outrider.speculation.proposal import FinishReason, Logprobs

if TYPE_CHECKING:
    from gateway.streams.draft import DraftLink
    from gateway.streams.target import TargetLink


class Session:
    """One generation in the services.

    target, draft: the links on which it is open; None while it waits for one
    features_end: hidden states of positions before it have been sent to the draft service
    """

    def __init__(self, session_id: int, request: GenerationRequest) -> None:
        """request: resolved, with max_tokens and a seed; its prompt has at least one token."""
        self.id = session_id
        self.request = request
        self.prompt_length = len(request.prompt)
        self.tokens: list[int] = list(request.prompt)
        self.target: TargetLink | None = None
        self.draft: DraftLink | None = None
        self.features_end = 0
        self.stats = SessionStats()
        self.inbox = Inbox(self.stats.steps)
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
            traceparent=request.traceparent,
        )

    def commit(
        self, tokens: list[int], verified: int, accepted: int, finish: FinishReason, logprobs: Logprobs | None = None
    ) -> None:
        """Append what one step committed, or several plain steps, and wake the client's coroutine."""
        self.tokens += tokens
        if self.reopening.active:
            self.reopening.append(tokens)
        stats = self.stats
        if tokens:
            self.failures.losses = 0
            stats.add(len(tokens), verified, accepted, self.watch.commit(tokens, verified) if self.watch else ())
        stats.verified += verified
        stats.accepted += accepted
        self.inbox.put(tokens, finish, logprobs)
