"""The types that the services exchange: proposals to the target, commits from it.

A *path* is the token sequence from the session's first token on; its *length* counts tokens; its *hash* is a rolling
64-bit hash of the tokens. A *node* is a path below the *root*, which is the last committed token. Parent and token give
a node's id in every process, so that merging proposals is idempotent and free of order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_MASK64 = (1 << 64) - 1
# hash(path + token) = hash(path) * _BASE + scramble(token)   (mod 2^64); the empty path hashes to _EMPTY.
_BASE = 0xD1342543DE82EF95
_EMPTY = 0x6A09E667F3BCC909


class FinishReason(IntEnum):
    """Why a session ended; RUNNING if it goes on. Values as in the protocol."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3


def _scramble(tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 finalizer of token ids."""
    x = (tokens + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def path_hash(tokens: NDArray[np.integer], start: int = _EMPTY) -> int:
    """Hash of the path `start` + tokens. tokens: [n]."""
    state = start
    for scrambled in _scramble(np.asarray(tokens).astype(np.uint64)).tolist():
        state = (state * _BASE + scrambled) & _MASK64
    return state


def path_hashes(tokens: NDArray[np.integer], start: int = _EMPTY) -> NDArray[np.uint64]:
    """Hashes of every prefix, the empty one first. tokens: [n]. Returns [n + 1] uint64."""
    hashes = np.empty(len(tokens) + 1, dtype=np.uint64)
    hashes[0] = state = start
    for i, scrambled in enumerate(_scramble(np.asarray(tokens).astype(np.uint64)).tolist(), start=1):
        hashes[i] = state = (state * _BASE + scrambled) & _MASK64
    return hashes


def extend_hash(path: int, token: int) -> int:
    """Hash of path + token."""
    x = ((token + 1) * 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (path * _BASE + (x ^ (x >> 31))) & _MASK64


@dataclass(frozen=True)
class Proposal:
    """Scored draft tokens below one anchor of one session.

    anchor_length, anchor_hash: the path that ends in the anchor, which is a committed token or a known draft token
    tokens:     [N] uint32
    parents:    [N] int32, index of an earlier node of this proposal; -1 is the anchor
    log_scores: [N] float32, estimated log-probability that the node is accepted once its parent is; at most 0
    """

    session_id: int
    anchor_length: int
    anchor_hash: int
    tokens: NDArray[np.uint32]
    parents: NDArray[np.int32]
    log_scores: NDArray[np.float32]
    committed_length: int = 0  # committed length that the drafter knew; of several drafters the least


@dataclass(frozen=True)
class Logprobs:
    """Natural-log probabilities of n consecutive tokens, before temperature, penalties and filters.

    first:      absolute position of the first token
    values:     [n] float32
    top_tokens: [n, k] uint32, the k most likely tokens at each position, best first
    top_values: [n, k] float32
    """

    first: int
    values: NDArray[np.float32]
    top_tokens: NDArray[np.uint32]
    top_values: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        """Size of the arrays, in bytes."""
        return self.values.nbytes + self.top_tokens.nbytes + self.top_values.nbytes

    @classmethod
    def joined(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """Concatenate parts whose tokens are consecutive."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            parts[0].first,
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.top_tokens for part in parts]),
            np.concatenate([part.top_values for part in parts]),
        )

    def until(self, count: int) -> Logprobs:
        """Those of the first `count` tokens."""
        return Logprobs(self.first, self.values[:count], self.top_tokens[:count], self.top_values[:count])

    def behind(self, count: int) -> Logprobs:
        """Those of all but the first `count` tokens."""
        return Logprobs(self.first + count, self.values[count:], self.top_tokens[count:], self.top_values[count:])


UNLIMITED_DRAFT = 0xFFFFFFFF  # draft budget without a limit, in tokens


@dataclass(frozen=True)
class Commit:
    """Tokens that one verification step committed in one session.

    base_length: committed length before the step
    tokens:      [n] uint32: the accepted path, then the bonus token (cut where the session finished); empty if the
                 commit only pauses drafting while the prompt is computed
    root_hash:   path hash after the commit
    verified, accepted: draft tokens that the step verified, and those that were accepted; if verified is 0, each token
                 had a step of its own
    source:      SourceKind of these draft tokens; 0 if there were none
    cached_tokens: prompt tokens that the prefix cache supplied; set in a session's first commit
    draft_budget: draft tokens that the next step can verify with profit; 0 pauses drafting for the session
    logprobs:    of the tokens, if the session asked for them
    prompt_logprobs: of the prompt's tokens except the first, if the session asked for them; in its first commit
    """

    session_id: int
    base_length: int
    tokens: NDArray[np.uint32]
    root_hash: int
    verified: int = 0
    accepted: int = 0
    finish_reason: FinishReason = FinishReason.RUNNING
    cached_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    draft_budget: int = UNLIMITED_DRAFT
    source: int = 0


def merge_commits(commits: Sequence[Commit]) -> list[Commit]:
    """The same commits, with consecutive ones of a session merged while its drafting was paused.

    A drafter then handles one long commit instead of many. Verified and accepted counts are summed; log-probabilities,
    which drafters do not read, are dropped.
    """
    last: dict[int, list[Commit]] = {}
    runs: list[list[Commit]] = []
    for commit in commits:
        run = last.get(commit.session_id)
        if run is None or not _follows(run[-1], commit):
            last[commit.session_id] = run = []
            runs.append(run)
        run.append(commit)
    return [_as_one(run) for run in runs]


def _follows(commit: Commit, later: Commit) -> bool:
    goes_on = commit.finish_reason == FinishReason.RUNNING and not commit.draft_budget
    return goes_on and later.base_length == commit.base_length + len(commit.tokens)


def _as_one(run: Sequence[Commit]) -> Commit:
    first, last = run[0], run[-1]
    if first is last:
        return first
    return replace(
        last,
        base_length=first.base_length,
        tokens=np.concatenate([commit.tokens for commit in run]),
        verified=sum(commit.verified for commit in run),
        accepted=sum(commit.accepted for commit in run),
        cached_tokens=first.cached_tokens,
        logprobs=None,
    )
