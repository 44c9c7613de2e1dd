"""Which tokens grammars allow after each row of a step, as bits: filled on the host, applied on the device.

A matcher's own chain of draft nodes is walked and rolled back inside llguidance, for all sessions at once and in
parallel. Where a tree branches, a copy of the automaton walks each branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from outrider.speculation.tree import ROOT, TreeSlice
from services.target.grammar import Matcher
from services.target.upload import upload

_MOST_THREADS = 8


@dataclass(frozen=True)
class Guided:
    """The rows of one session that a grammar binds, row `first` being the root's.

    banned: for each row, token ids that may not be drawn unless the grammar leaves no other
    """

    first: int
    matcher: Matcher
    draft: TreeSlice
    banned: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Mask:
    """rows: [M] int64; words: [M, ceil(V / 32)] int32, bit i of word j is token 32 j + i. On the device."""

    rows: Tensor
    words: Tensor


class Masks:
    """Fills one buffer, which every step uses again."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = -(-vocab_size // 32)
        self._device = device
        self._executor = LLExecutor(min(torch.get_num_threads(), _MOST_THREADS))
        self._buffer = self._allocate(64)

    def fill(self, sessions: Sequence[Guided]) -> Mask:
        """What may be drawn after each row of these sessions. A matcher that meets a limit gets its fault set.

        The step before must have been waited for.
        """
        count = sum(len(guided.draft) + 1 for guided in sessions)
        if count > len(self._buffer):
            self._buffer = self._allocate(2 * count)
        rows = np.empty(count, np.int64)
        single: list[tuple[LLMatcher, int]] = []
        chained: list[tuple[LLMatcher, int, list[int]]] = []
        walks: list[tuple[Matcher, LLMatcher, slice]] = []
        place = 0
        for guided in sessions:
            tokens = guided.draft.tokens.tolist()
            for chain, path in _chains(guided.draft):
                state = guided.matcher.after(path)
                walks.append((guided.matcher, state, slice(place, place + len(chain))))
                rows[place : place + len(chain)] = np.array(chain) + guided.first + 1
                if len(chain) > 1:
                    chained.append((state, place, [tokens[node] for node in chain[1:]]))
                else:
                    single.append((state, place))
                place += len(chain)
        bits = self._buffer[:count].numpy()
        self._compute(bits, single, chained)
        for matcher, state, part in walks:
            if state.is_error():
                matcher.fail(state)
                bits[part] = 0  # nothing can be drawn: the session ends if its text gets there
        for guided in sessions:
            _ban(bits, rows, guided)
        words = self._buffer[:count].to(self._device, non_blocking=True)
        return Mask(*upload([rows], self._device), words)

    def _compute(
        self,
        bits: NDArray[np.int32],
        single: list[tuple[LLMatcher, int]],
        chained: list[tuple[LLMatcher, int, list[int]]],
    ) -> None:
        place, size = bits.ctypes.data, 4 * self._words
        if single:
            self._executor.unsafe_compute_mask_ptr(single, place, size, len(bits))
        if chained:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(chained, place, size, len(bits))

    def _allocate(self, rows: int) -> Tensor:
        return torch.empty(rows, self._words, dtype=torch.int32, pin_memory=self._device.type == "cuda")


def _chains(draft: TreeSlice) -> list[tuple[list[int], list[int]]]:
    """Cut a tree, root included, into chains of nodes. Returns (nodes, tokens that lead to the first and itself)."""
    chains: list[tuple[list[int], list[int]]] = [([ROOT], [])]
    chain_of = {ROOT: 0}
    tokens = draft.tokens.tolist()
    paths: list[list[int]] = []
    for node, (token, parent) in enumerate(zip(tokens, draft.parents.tolist(), strict=True)):
        paths.append([token] if parent == ROOT else [*paths[parent], token])
        chain = chains[chain_of[parent]][0]
        if chain[-1] == parent:
            chain.append(node)
            chain_of[node] = chain_of[parent]
        else:
            chain_of[node] = len(chains)
            chains.append(([node], paths[node]))
    return chains


def _ban(bits: NDArray[np.int32], rows: NDArray[np.int64], guided: Guided) -> None:
    """Take banned tokens out of a session's masks that have others."""
    for row, tokens in enumerate(guided.banned, start=guided.first):
        if tokens:
            mask = bits[rows == row][0].view(np.uint32).copy()
            ids = np.array(tokens, np.uint32)
            np.bitwise_and.at(mask, ids >> 5, ~(np.uint32(1) << (ids & 31)))
            if mask.any():
                bits[rows == row] = mask.view(np.int32)


def apply(logits: Tensor, mask: Mask) -> None:
    """Make what is not allowed impossible, in place. logits: [R, V] float32."""
    octets = mask.words.view(torch.uint8)  # [M, 4 W], little-endian
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = ((octets[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.index_copy_(0, mask.rows, logits.index_select(0, mask.rows).masked_fill_(~allowed, -torch.inf))
