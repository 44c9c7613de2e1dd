"""What stored n-grams can do, compiled or plain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_LEAD = 0xFFFFFFFF
"""The lead of what everybody shares. Any other stands before all paths of those who share it; no token is as large."""

POOL = 32  # children that share a probability
COUNTED = 1024  # children that are looked at, the ones stored last, for the most frequent
PRIOR_WEIGHT, FADING = 4.0, 0.999  # of what is learned about trust


@dataclass(frozen=True)
class NgramOptions:
    """Flags of storing and looking up, under SGLang's names. draft_token_num counts the root."""

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
    """N nodes that may follow a context. parents: index of an earlier one, or -1; log_scores: of the edges."""

    tokens: list[int]
    parents: list[int]
    log_scores: list[float]


class Ngrams(ABC):
    """Stored paths of tokens. One owner; not thread-safe. Arrays of tokens are [n] uint32."""

    @abstractmethod
    def __len__(self) -> int:
        """Nodes that are stored."""

    @abstractmethod
    def insert(self, tokens: NDArray[np.uint32], lead: int = NO_LEAD, first: int = 0, stop: int | None = None) -> None:
        """Store the path from every token on that leaves more than the shortest window behind it.

        first, stop: of the tokens where paths begin; all by default
        """

    @abstractmethod
    def commit(
        self, tokens: NDArray[np.uint32], fresh: int, *, noisy: bool, lead: int = NO_LEAD, keep: bool = True
    ) -> None:
        """The last `fresh` of a session's tokens are new: learn from them what to trust, then store the paths in which
        they are.

        noisy: the session samples. keep: False to store nothing.
        """

    @abstractmethod
    def look_up(
        self, context: NDArray[np.uint32], keys: NDArray[np.uint32] | None, lead: int = NO_LEAD
    ) -> Continuations:
        """What may follow a context, at most as many nodes as a draft has.

        keys: [branch length + 1, 2] uint32, noise keys of the next positions; None for a session that does not sample
        """

    @abstractmethod
    def trust(self, length: int, *, noisy: bool) -> float:
        """Chance that a suffix of some tokens goes on as it is stored, but as no longer one does."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all paths."""
