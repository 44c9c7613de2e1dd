"""Bit masks of the tokens that grammars allow after each row of a step: filled on the host, applied on the device.

Each draft node has a copy of the automaton that was advanced along its path. llguidance could walk a chain and roll it
back, but it caches the last mask under a key that other paths may share (1.9), and cannot roll back some grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from outrider.speculation.tree import TreeSlice
from services.target.grammar.matcher import Matcher
from services.target.step.token_mask import TokenMask
from services.target.step.upload import upload

_MAX_THREADS = 8


@dataclass(frozen=True)
class GrammarRows:
    """The rows of one session with a grammar. first: the root's row.

    banned: for each row, token ids that may not be sampled unless the grammar allows no others
    """

    first: int
    matcher: Matcher
    draft: TreeSlice
    banned: Sequence[Sequence[int]]


class Masks:
    """Fills masks in one buffer, which every step reuses."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = -(-vocab_size // 32)
        self._device = device
        self._executor = LLExecutor(min(torch.get_num_threads(), _MAX_THREADS))
        self._buffer = self._allocate(64)

    def fill(self, sessions: Sequence[GrammarRows]) -> TokenMask:
        """The tokens allowed after each row of these sessions. Sets the fault of a matcher that exceeds a limit.

        The previous step must be complete, because its copy to the device reads the same buffer.
        """
        count = sum(len(guided.draft) + 1 for guided in sessions)
        if count > len(self._buffer):
            self._buffer = self._allocate(2 * count)
        rows = np.empty(count, np.int64)
        states: list[tuple[LLMatcher, int]] = []
        matchers: list[Matcher] = []
        for guided in sessions:
            rows[len(states) : len(states) + len(guided.draft) + 1] = guided.first + np.arange(len(guided.draft) + 1)
            states += [(state, len(states) + i) for i, state in enumerate(guided.matcher.along(guided.draft))]
            matchers += [guided.matcher] * (len(guided.draft) + 1)
        bits = self._buffer[:count].numpy()
        if states:
            self._executor.unsafe_compute_mask_ptr(states, bits.ctypes.data, 4 * self._words, count)
        for matcher, (state, place) in zip(matchers, states, strict=True):
            if state.is_error():
                matcher.fail(state)
                bits[place] = 0  # no token is allowed: the session ends if its text reaches this row
        for guided in sessions:
            _ban(bits, rows, guided)
        words = self._buffer[:count].to(self._device, non_blocking=True)
        (placed,) = upload([rows], self._device)
        return TokenMask(placed, words)

    def _allocate(self, rows: int) -> Tensor:
        return torch.empty(rows, self._words, dtype=torch.int32, pin_memory=self._device.type == "cuda")


def _ban(bits: NDArray[np.int32], rows: NDArray[np.int64], guided: GrammarRows) -> None:
    """Remove banned tokens from those of a session's masks that allow others."""
    for row, tokens in enumerate(guided.banned, start=guided.first):
        if tokens:
            mask = bits[rows == row][0].view(np.uint32).copy()
            ids = np.array(tokens, np.uint32)
            np.bitwise_and.at(mask, ids >> 5, ~(np.uint32(1) << (ids & 31)))
            if mask.any():
                bits[rows == row] = mask.view(np.int32)


def apply(logits: Tensor, mask: TokenMask) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place. logits: [R, V] float32."""
    octets = mask.words.view(torch.uint8)  # [M, 4 W], little-endian
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = ((octets[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.index_copy_(0, mask.rows, logits.index_select(0, mask.rows).masked_fill_(~allowed, -torch.inf))
