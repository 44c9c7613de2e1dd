"""Sampling with the compiled kernel: the same tokens as services.target.sampling.sampler, its plain twin.

A session is packed once; a step hands over the packed sessions and the positions of its rows. Programs draw along with
the logits, which spares a step the waking of threads.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.speculation.sampling import SamplingParams
from services.target.kernels.cpu import library
from services.target.kernels.cpu.pool import shared_pool
from services.target.step.batch import SamplingPlan
from services.target.step.token_mask import TokenMask

_SAMPLING = struct.Struct("<dddqQ")  # csrc/draw.h


def pack(params: SamplingParams) -> bytes:
    """How the rows of a session are drawn."""
    temperature = 0.0 if params.greedy else params.temperature
    top_k = min(params.top_k, 2**63 - 1)
    return _SAMPLING.pack(temperature, params.top_p, params.min_p, top_k, params.seed)


@dataclass(frozen=True)
class HeadDraftTokens:
    """Drafts of n steps, for S sessions.

    tokens: [n, S] int64, -1 where none could be drawn; seconds: [n, S] int64, what would be drawn if those were not
    odds: [n, S, 2] float32, the probability of each token, and that of the second one if it is not that
    """

    tokens: NDArray[np.int64]
    seconds: NDArray[np.int64]
    odds: NDArray[np.float32]


class SampledRows:
    """A call of the kernel. `pointer` is what it takes, `tokens` [R] int64 where it puts them."""

    def __init__(
        self,
        logits: int,
        vocab: int,
        plan: SamplingPlan,
        mask: TokenMask | None = None,
        steps: int = 1,
        *,
        seconds: bool = False,
        ids: Tensor | None = None,
    ) -> None:
        """logits: where [R or more, V] float32 lie, row after row; vocab: V; mask: what grammars allow.

        steps: for which there is room; the tokens of each lie behind those of the one before it. seconds: as of
        Guesses, wanted too; logits are overwritten for that. ids: [V] int32, ascending, which tokens the logits are
        of; None if they are all, in order
        """
        assert plan.positions.typecode == plan.counts.typecode == "q", "the kernel reads these"
        rows = len(plan.positions)
        self.tokens = np.empty(steps * rows, np.int64)
        self._rows = rows
        self._seconds = np.empty(steps * rows, np.int64) if seconds else None
        self._odds = np.empty(2 * steps * rows, np.float32) if seconds else None
        lines = None
        if mask is not None:
            lines = np.full(rows, -1)
            lines[mask.rows.numpy()] = np.arange(len(mask.rows))
        self._arrays = plan, lines, mask
        self._call = library.DrawCall(
            logits, rows, vocab, plan.sessions, plan.counts.buffer_info()[0],
            plan.positions.buffer_info()[0], None if lines is None else lines.ctypes.data,
            None if mask is None else mask.words.data_ptr(), self.tokens.ctypes.data,
            None if self._seconds is None else self._seconds.ctypes.data,
            None if ids is None else ids.data_ptr(),
            None if self._odds is None else self._odds.ctypes.data,
        )  # fmt: skip
        self.pointer = ctypes.byref(self._call)

    def guesses(self, steps: int) -> HeadDraftTokens:
        """What so many steps drew, with second ones."""
        assert self._seconds is not None, "they were asked for"
        assert self._odds is not None, "they were asked for"
        count, shape = steps * self._rows, (steps, self._rows)
        tokens, seconds = self.tokens[:count].reshape(shape), self._seconds[:count].reshape(shape)
        return HeadDraftTokens(tokens, seconds, self._odds[: 2 * count].reshape(*shape, 2))


def draw(logits: Tensor, plan: SamplingPlan, mask: TokenMask | None = None) -> NDArray[np.int64]:
    """The token after each row. Returns [R]; -1 where logits are not finite.

    logits: [R, V] float32, with penalties and bias; mask: what grammars allow
    """
    assert logits.is_contiguous(), "the kernel walks through memory in order"
    assert logits.dtype == torch.float32, "the kernel reads these"
    assert len(logits) >= len(plan.positions), "one position a row"
    draws = SampledRows(logits.data_ptr(), logits.shape[1], plan, mask)
    library.load().outrider_draw(shared_pool().handle, draws.pointer)
    return draws.tokens
