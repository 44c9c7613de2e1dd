"""Log-probabilities of tokens, on the device: of the logits before penalties, grammar and filters.

Only rows of sessions that asked for them are computed, a few at a time, because a row needs several vocabularies of
working memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.speculation.proposal import Logprobs

_PIECE_BYTES = 32 << 20  # float32 logits computed at a time
_SCORED_BYTES = 64 << 20  # logits of a step that are only scored


def scored_rows(vocab_size: int) -> int:
    """Most rows of prompts that a step may score."""
    return max(16, _SCORED_BYTES // (4 * vocab_size))


class Scores(NamedTuple):
    """Of n rows: log-probability of one token each, [n]; the k most probable tokens and log-probabilities, [n, k]."""

    values: Tensor
    top_tokens: Tensor
    top_values: Tensor

    def logprobs(self, first: int, rows: Sequence[int] | slice, top: int) -> Logprobs:
        """The log-probabilities of some rows, whose tokens start at position `first`. Tensors must be on the host."""
        return Logprobs(
            first,
            self.values[rows].numpy(),
            self.top_tokens[rows, :top].numpy().astype(np.uint32),
            self.top_values[rows, :top].numpy(),
        )


def score(logits: Tensor, rows: Tensor, tokens: Tensor, top: int, divisors: Tensor | None = None) -> Scores:
    """Score a token after each of n rows. logits: [R, V]; rows, tokens: [n] int64; top: most probable ones.

    divisors: of the rows' logits, [n, 1] float32; None for 1
    """
    size = max(1, _PIECE_BYTES // (4 * logits.shape[1]))
    pieces = []
    for start in range(0, len(rows), size):
        x = logits.index_select(0, rows[start : start + size]).float()
        if divisors is not None:
            x = x / divisors[start : start + size]
        best = x.topk(min(top, x.shape[1]), dim=-1).indices
        normal = x.log_softmax(dim=-1)  # sums every row in one order; logsumexp splits a single row over threads
        own = normal.gather(1, tokens[start : start + size, None].clamp(min=0))
        pieces.append((own[:, 0], best.to(torch.int32), normal.gather(1, best)))
    values, top_tokens, top_values = zip(*pieces, strict=True)
    return Scores(torch.cat(values), torch.cat(top_tokens), torch.cat(top_values))


class PromptScores:
    """A prompt's log-probabilities, filled chunk by chunk, on the host."""

    def __init__(self, prompt_length: int, top: int) -> None:
        self.top = top
        self._values = np.empty(prompt_length - 1, np.float32)
        self._top_tokens = np.empty((prompt_length - 1, top), np.uint32)
        self._top_values = np.empty((prompt_length - 1, top), np.float32)

    def put(self, part: Logprobs) -> None:
        """Store the log-probabilities of some of the prompt's tokens."""
        place = slice(part.first - 1, part.first - 1 + len(part))
        self._values[place], self._top_tokens[place], self._top_values[place] = (
            part.values, part.top_tokens, part.top_values,
        )  # fmt: skip

    def whole(self) -> Logprobs:
        """The log-probabilities of all tokens but the first."""
        return Logprobs(1, self._values, self._top_tokens, self._top_values)


def next_tokens(tokens: NDArray[np.uint32], positions: range) -> NDArray[np.int64]:
    """The tokens after some positions of a sequence."""
    return tokens[positions.start + 1 : positions.stop + 1].astype(np.int64)
