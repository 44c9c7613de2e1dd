"""A session in an engine: tokens, lengths and pages."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.paging.prefix import PrefixCache, SharedTable
from outrider.serving.messages import OpenSession
from outrider.speculation.draft_source import SourceKind

UNBOUNDED = 1 << 30  # draft tokens in a step: no limit


@dataclass(slots=True)
class SessionRecord:
    """What is reported of a session: to tracing, in the log, and with its first commit.

    traceparent: of the request; empty if it is not traced
    opened_at, admitted_at, first_at: times of opening, first admission and first commit, in nanoseconds since 1970; 0
        before that
    cached_tokens: prompt tokens that the prefix cache supplied at the first admission
    """

    traceparent: str
    opened_at: int
    admitted_at: int = 0
    first_at: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class PromptScores:
    """Prompt tokens, from the first on, whose logits are needed, and how many of them were computed."""

    needed: int
    computed: int = 0

    @property
    def complete(self) -> bool:
        """True if no logits are missing."""
        return self.computed == self.needed


@dataclass(slots=True)
class Drafting:
    """What may be drafted for a session.

    max_tokens: draft tokens in a step
    sources: those that may draft; none if no draft tokens may be verified
    paused: True if the last commit to the drafters paused drafting
    """

    max_tokens: int
    sources: frozenset[SourceKind]
    paused: bool = False


class Session:
    """Tokens, cache lengths and pages of one session. Owned by the engine thread.

    Lengths, in tokens:   0 <= computed <= length;   prompt_length <= length
        tokens  0 ........ computed | ........ length-1 |
                in the cache        | pending           |

    Tokens count as computed once their step is launched. No token is pending while the next one is being sampled.

    """

    def __init__(self, request: OpenSession, prefix: PrefixCache) -> None:
        self.id = request.session_id
        self.sampling = request.sampling
        self.stop = request.stop
        self.prompt_length = request.prompt_length
        self.priority = request.priority
        self.caller = request.caller
        most = UNBOUNDED if request.max_draft_tokens is None else request.max_draft_tokens
        self.drafting = Drafting(most, request.draft_sources if most else frozenset())
        self.length = len(request.tokens)
        self.opened_length = self.length
        self.computed = 0
        self.record = SessionRecord(request.traceparent, time.time_ns())
        asked = request.prompt_logprobs is not None and self.length == self.prompt_length
        self.scores = PromptScores(self.prompt_length - 1 if asked else 0)
        self.table = SharedTable(prefix, request.cache_salt, self.id)
        self._began = False  # the session was evicted, or has committed a token
        self._tokens = np.empty(self.length + 256, dtype=np.uint32)
        self._tokens[: self.length] = request.tokens

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """Prompt and committed tokens, [length] uint32, a view."""
        return self._tokens[: self.length]

    @property
    def sharable(self) -> NDArray[np.uint32]:
        """Tokens whose KV may come from the prefix cache: all but the last, which must be computed to go on.

        While logits of the prompt are missing, only the tokens whose logits are known.
        """
        return self._tokens[: self.length - 1 if self.scores.complete else self.scores.computed]

    @property
    def pending(self) -> int:
        """Committed tokens that are not in the cache; 0 only while the next one is being sampled."""
        return self.length - self.computed

    @property
    def new_tokens(self) -> int:
        """Tokens committed after the prompt."""
        return self.length - self.prompt_length

    @property
    def begun(self) -> bool:
        """True if the session ran before, here or elsewhere, so that it has already waited."""
        return self._began or self.new_tokens > 0

    @property
    def lacking(self) -> int:
        """New tokens that must be committed before a stop token may end the session; 0 or less if none."""
        return self.stop.min_tokens - self.new_tokens

    def tokens_with_room(self, count: int) -> int:
        """Memory address of the tokens, with room for `count` further ones."""
        self._make_room(self.length + count)
        return self._tokens.ctypes.data

    def _make_room(self, length: int) -> None:
        if length > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * length)

    def append(self, tokens: NDArray[np.integer]) -> None:
        """Commit tokens, [n]."""
        end = self.length + len(tokens)
        self._make_room(end)
        self._tokens[self.length : end] = tokens
        self.length = end
        self._began = True

    def expect(self) -> None:
        """Count a token that is still being sampled, so that the next step can be planned before its id is known."""
        self.append(np.zeros(1, np.uint32))

    def unexpect(self) -> None:
        """Remove the expected token, before its id is appended."""
        self.length -= 1

    def attach(self) -> None:
        """Take the session's next pages from the prefix cache, if it has them."""
        if taken := self.table.attach(self.sharable, self.computed):
            self.computed += taken
            if not self._began:
                self.record.cached_tokens = min(self.record.cached_tokens + taken, self.prompt_length)

    def score_anew(self) -> None:
        """Compute the prompt's logits again after a change of weights, unless they were already reported."""
        if self.length == self.opened_length:
            self.scores.computed = 0

    def publish(self) -> None:
        """Give full pages to the prefix cache. The KV of every computed token must have been written."""
        self.table.publish(self._tokens[: self.computed])

    def evict(self, *, trusted: bool = True) -> None:
        """Release all pages; the tokens stay and are computed again later.

        trusted: False also removes the session's published pages from the prefix cache
        """
        self.table.release(trusted=trusted)
        self.computed = 0
        self._began = True
