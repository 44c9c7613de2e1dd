"""The interface of n-gram stores, compiled or plain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_NAMESPACE = 0xFFFFFFFF
"""The namespace of n-grams that all sessions share. Any other id stands before each path; no token is as large."""

POOL = 32  # children that share a probability
COUNTED = 1024  # children that are compared by frequency, the most recent ones
PRIOR_WEIGHT, FADING = 4.0, 0.999  # of the accuracy estimates: weight of the prior, decay


@dataclass(frozen=True)
class NgramOptions:
    """Flags of storing and looking up, with SGLang's names. draft_token_num counts the root."""

    match_type: Literal["BFS", "PROB"] = "BFS"
    min_match_window_size: int = 1
    max_match_window_size: int = 12
    min_bfs_breadth: int = 1
    max_bfs_breadth: int = 10
    branch_length: int = 18
    capacity: int = 10_000_000
    draft_token_num: int = 12
    insert_prompts: bool = True


class Continuations(NamedTuple):
    """N nodes that may follow a context. parents: index of an earlier node, or -1; log_scores: of the edges."""

    tokens: list[int]
    parents: list[int]
    log_scores: list[float]


class Ngrams(ABC):
    """Stored token paths. Owned by one thread. Arrays of tokens are [n] uint32."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of stored nodes."""

    @abstractmethod
    def insert(
        self, tokens: NDArray[np.uint32], namespace_id: int = NO_NAMESPACE, first: int = 0, stop: int | None = None
    ) -> None:
        """Store the path from every token that has more tokens behind it than the shortest window.

        first, stop: range of the first tokens of the paths; all by default
        """

    @abstractmethod
    def commit(
        self,
        tokens: NDArray[np.uint32],
        fresh: int,
        *,
        noisy: bool,
        namespace_id: int = NO_NAMESPACE,
        keep: bool = True,
    ) -> None:
        """Process the last `fresh` tokens of a session: update the accuracy estimates, then store paths with them.

        noisy: the session samples. keep: False to store nothing.
        """

    @abstractmethod
    def look_up(
        self, context: NDArray[np.uint32], keys: NDArray[np.uint32] | None, namespace_id: int = NO_NAMESPACE
    ) -> Continuations:
        """Continuations of a context, at most as many nodes as a draft has.

        keys: [branch length + 1, 2] uint32, noise keys of the next positions; None for a greedy session
        """

    @abstractmethod
    def accuracy(self, length: int, *, noisy: bool) -> float:
        """Probability that a suffix of `length` tokens continues as stored, given that no longer suffix does."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all paths."""
