"""A session as the gateway holds it: the truth about its tokens, and what its client has not been told yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gateway.sessions.draft_watch import Watch
from gateway.sessions.prefixes import Trail
from gateway.sessions.step_stats import Round
from outrider.errors import OutriderError
from outrider.serving.messages import Grammar, OpenSession
from outrider.speculation.proposal import FinishReason, Logprobs, path_hash
from outrider.speculation.sampling import SamplingParams, StopConditions

if TYPE_CHECKING:
    from gateway.streams.draft import DraftLink
    from gateway.streams.target import TargetLink

_PLAIN = Round(1, 0, 0)


class Committed(NamedTuple):
    """New tokens of a session, and the steps that they came from. finish: RUNNING unless they are the last."""

    tokens: list[int]
    finish: FinishReason
    rounds: list[Round]
    logprobs: Logprobs | None = None


class Session:
    """Prompt, committed tokens, parameters, where it runs, and how speculation went.

    target, draft: the links it is open on; None while it waits for one.
    """

    def __init__(
        self,
        session_id: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        stop: StopConditions,
        cache_salt: str = "",
        grammar: Grammar | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        priority: int = 0,
        max_draft_tokens: int | None = None,
        traceparent: str = "",
        watched: bool = False,
        counted: bool = True,
    ) -> None:
        """prompt: token ids, at least one. watched: rounds tell what the draft guessed. counted: in the metrics.

        Others as in OpenSession.
        """
        self.watch = Watch(prompt) if watched else None
        self.counted = counted
        self.id = session_id
        self.prompt_length = len(prompt)
        self.tokens: list[int] = list(prompt)
        self.sampling = sampling
        self.stop = stop
        self.cache_salt = cache_salt
        self.grammar = grammar
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self.priority = priority
        self.max_draft_tokens = max_draft_tokens
        self.traceparent = traceparent
        self.prompt_told: Logprobs | None = None  # log-probabilities of the prompt, once they are known
        self.cached_tokens = 0  # of the prompt, found in the first target's prefix cache
        self.trail = Trail(cache_salt)  # of its tokens
        self.target: TargetLink | None = None
        self.draft: DraftLink | None = None
        self.target_failures = 0
        self.losses = 0  # of targets, one after another, without a token in between
        self.refused_by: set[TargetLink] = set()  # targets whose queue was full
        self.draft_failures = 0
        self.draft_failed_at = 0  # how many tokens there were then
        self.verified = 0
        self.accepted = 0
        self.finish = FinishReason.RUNNING
        self.rounds: list[Round] = []
        self.opened_at = self.first_at = self.committed_at = time.perf_counter()
        self.features_until = 0  # positions before it have been sent to the draft
        self.weight_version = ""  # of the last commit
        self.lingers = False  # the target may go on with it after its end, for it was opened there twice
        self.strayed = False  # the target has another text, and was told this one
        self._root = 0  # path hash of its tokens; kept up while it lingers
        self._fresh: list[int] = []
        self._rounds_given = 0  # steps that the client has been told of
        self._told: list[Logprobs] = []  # of the fresh tokens
        self._error: OutriderError | None = None
        self._news = asyncio.Event()

    @property
    def steps(self) -> int:
        """Steps that its new tokens came from."""
        return len(self.rounds)

    @property
    def new_tokens(self) -> int:
        """Tokens committed after the prompt."""
        return len(self.tokens) - self.prompt_length

    def request(self, feature_spec: int = 0) -> OpenSession:
        """What opens it, or opens it again: prompt and committed tokens. feature_spec: of the draft; 0 is none."""
        tokens = np.array(self.tokens, dtype=np.uint32)
        return OpenSession(
            self.id,
            tokens,
            self.prompt_length,
            self.sampling,
            self.stop,
            self.cache_salt,
            self.grammar,
            self.logprobs,
            self.prompt_logprobs,
            feature_spec=feature_spec,
            features_from=self.features_until if feature_spec else 0,
            priority=self.priority,
            max_draft_tokens=self.max_draft_tokens,
            traceparent=self.traceparent,
        )

    def linger(self) -> None:
        """It is opened once more on the target that has it: commits of both runs may come from now on."""
        if not self.lingers:
            self._root = path_hash(np.array(self.tokens, np.uint32))
        self.lingers = True

    def continues(self, base: int, tokens: Sequence[int], root_hash: int) -> bool:
        """True if a commit goes on with this text, or repeats a part of it.

        Where what stands beside a row changes its rounding, the runs of a session that was opened twice may differ.
        """
        if not self.lingers:
            return True
        known = len(self.tokens) - base
        new = tokens[known:]
        if list(tokens[:known]) != self.tokens[base : base + min(known, len(tokens))]:
            return False
        return not new or path_hash(np.array(new, np.uint32), self._root) == root_hash

    def commit(
        self, tokens: list[int], verified: int, accepted: int, finish: FinishReason, logprobs: Logprobs | None = None
    ) -> None:
        """Append what a step committed, or several plain ones, and wake who waits for it."""
        self.tokens += tokens
        if self.lingers:
            self._root = path_hash(np.array(tokens, np.uint32), self._root)
        if tokens:
            self.losses = 0
            guess = self.watch.committed(tokens, verified) if self.watch is not None else ()
            if verified:
                self.rounds.append(Round(len(tokens), verified, accepted, guess))
            else:
                self.rounds += [_PLAIN] * len(tokens)
        self.verified += verified
        self.accepted += accepted
        self.finish = finish
        self._fresh += tokens
        if logprobs is not None:
            self._told.append(logprobs)
        self._news.set()

    def fail(self, error: OutriderError) -> None:
        """End it with an error."""
        self._error = error
        self._news.set()

    async def next(self) -> Committed:
        """What was committed since the last call. Raises the OutriderError that ended the session."""
        await self._news.wait()
        fresh, self._fresh = self._fresh, []
        if self._error is None:
            self._news.clear()
        elif not fresh:
            raise self._error
        told, self._told = self._told, []
        rounds, self._rounds_given = self.rounds[self._rounds_given :], len(self.rounds)
        return Committed(fresh, self.finish, rounds, Logprobs.joined(told) if told else None)
