"""A session as the gateway owns it: specification, tokens, links, statistics, recovery, and the client's inbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gateway.sessions.draft_watch import DraftWatch
from gateway.sessions.prefixes import PrefixHashes
from gateway.sessions.request import GenerationRequest
from gateway.sessions.step_stats import PLAIN_STEP, SourceCounts, StepStats, add_counts
from outrider.errors import OutriderError
from outrider.serving.messages import OpenSession
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.proposal import FinishReason, Logprobs, path_hash

if TYPE_CHECKING:
    from gateway.streams.draft import DraftLink
    from gateway.streams.target import TargetLink


InTurn = Callable[[Callable[[], object]], object]
"""Does a piece of work for a client when it is its turn."""


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


@dataclass
class Failures:
    """How often services failed a session, which bounds how often it is opened again.

    target: failures that a target reported
    losses: lost targets and lost frames since the last committed token
    draft, draft_at: failures that a draft service reported, and the number of tokens at the last one
    refused_by: targets whose admission queue was full
    """

    target: int = 0
    losses: int = 0
    draft: int = 0
    draft_at: int = 0
    refused_by: set[TargetLink] = field(default_factory=set)


class Reopening:
    """A session that was opened a second time on the target that has it: commits of both runs may arrive.

    The runs may differ where batch composition changes rounding, so a commit is taken only if it continues the text
    that the client has.

    active: the session was opened twice. The target may continue it after its end.
    diverged: the target generates another text, and has been sent this one
    """

    def __init__(self) -> None:
        self.active = False
        self.diverged = False
        self._root = 0  # path hash of the session's tokens; kept up to date while active

    def start(self, tokens: Sequence[int]) -> None:
        """The session is opened again with these tokens."""
        if not self.active:
            self._root = path_hash(np.array(tokens, np.uint32))
        self.active = True

    def accepts(self, text: Sequence[int], base: int, tokens: Sequence[int], root_hash: int) -> bool:
        """True if a commit of `tokens` at position `base` continues the text or repeats a part of it."""
        if not self.active:
            return True
        known = len(text) - base
        new = tokens[known:]
        if list(tokens[:known]) != text[base : base + min(known, len(tokens))]:
            return False
        return not new or path_hash(np.array(new, np.uint32), self._root) == root_hash

    def append(self, tokens: Sequence[int]) -> None:
        """Tokens were committed. Call only while active."""
        self._root = path_hash(np.array(tokens, np.uint32), self._root)


class Committed(NamedTuple):
    """New tokens of a session, and the steps that they came from. finish: RUNNING unless they are the last."""

    tokens: list[int]
    finish: FinishReason
    steps: list[StepStats]
    logprobs: Logprobs | None = None


class Inbox:
    """Commits that the client has not received yet."""

    def __init__(self, steps: list[StepStats], in_turn: InTurn) -> None:
        """steps: of the session, which grow with every commit. in_turn: wakes the client's coroutine."""
        self._in_turn = in_turn
        self._due = False  # it waits for its turn
        self._new = False  # there is something that the client's coroutine has not taken
        self.finish = FinishReason.RUNNING
        self.prompt_logprobs: Logprobs | None = None  # once they are known, until the client receives them
        self._steps = steps
        self._steps_taken = 0
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []  # of `_tokens`
        self._error: OutriderError | None = None
        self._filled = asyncio.Event()

    def put(self, tokens: list[int], finish: FinishReason, logprobs: Logprobs | None) -> None:
        """Add committed tokens, and wake the waiting coroutine in its turn."""
        self.finish = finish
        self._tokens += tokens
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._new = True
        if not self._due:
            self._due = True
            self._in_turn(self._wake)

    def _wake(self) -> None:
        self._due = False
        if self._new:
            self._filled.set()

    def fail(self, error: OutriderError) -> None:
        """End with an error, which `next` raises behind the tokens that are still here."""
        self._error = error
        self._filled.set()

    async def next(self) -> Committed:
        """Everything committed since the last call. Raises the OutriderError that ended the session."""
        await self._filled.wait()
        tokens, self._tokens, self._new = self._tokens, [], False
        if self._error is None:
            self._filled.clear()
        elif not tokens:
            raise self._error
        logprobs, self._logprobs = self._logprobs, []
        steps, self._steps_taken = self._steps[self._steps_taken :], len(self._steps)
        return Committed(tokens, self.finish, steps, Logprobs.joined(logprobs) if logprobs else None)


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
