"""Sampling by the compiled kernel: the same tokens as services.target.sampling.sampler, its plain twin.

A session's parameters are packed once; each step passes the packed sessions and the positions of its rows. Programs
sample in the call that computes the logits, which saves a step another wake-up of threads.
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

_SAMPLING = struct.Struct("<dddqQ")  # csrc/sampling/sampling.h


def pack(params: SamplingParams) -> bytes:
    """A session's sampling parameters as the kernel reads them."""
    temperature = 0.0 if params.greedy else params.temperature
    top_k = min(params.top_k, 2**63 - 1)
    return _SAMPLING.pack(temperature, params.top_p, params.min_p, top_k, params.seed)


@dataclass(frozen=True)
class HeadDraftTokens:
    """Draft tokens of n steps, for S sessions.

    tokens: [n, S] int64, -1 where logits are not finite; probabilities: [n, S] float32
    """

    tokens: NDArray[np.int64]
    probabilities: NDArray[np.float32]


class SampledRows:
    """A call of the kernel. pointer: its argument; tokens: [R] int64, its result."""

    def __init__(
        self,
        logits: int,
        vocab: int,
        plan: SamplingPlan,
        mask: TokenMask | None = None,
        steps: int = 1,
        *,
        probabilities: bool = False,
        ids: Tensor | None = None,
    ) -> None:
        """logits: address of at least [R, V] float32; vocab: V; mask: the tokens that grammars allow.

        steps: most steps, whose tokens follow one another. probabilities: compute those of the tokens, too.
        ids: [V] int32, ascending token ids of the logits; None: the vocabulary in order.
        """
        assert plan.positions.typecode == plan.counts.typecode == "q", "the kernel reads int64"
        rows = len(plan.positions)
        self.tokens = np.empty(steps * rows, np.int64)
        self._rows = rows
        self._probabilities = np.empty(steps * rows, np.float32) if probabilities else None
        lines = None
        if mask is not None:
            lines = np.full(rows, -1)
            lines[mask.rows.numpy()] = np.arange(len(mask.rows))
        self._arrays = plan, lines, mask
        self._call = library.SampleCall(
            logits, rows, vocab, plan.sessions, plan.counts.buffer_info()[0],
            plan.positions.buffer_info()[0], None if lines is None else lines.ctypes.data,
            None if mask is None else mask.words.data_ptr(), self.tokens.ctypes.data,
            None if ids is None else ids.data_ptr(),
            None if self._probabilities is None else self._probabilities.ctypes.data,
        )  # fmt: skip
        self.pointer = ctypes.byref(self._call)

    def draft_tokens(self, steps: int) -> HeadDraftTokens:
        """The samples of the first `steps` steps."""
        assert self._probabilities is not None, "requires probabilities"
        count, shape = steps * self._rows, (steps, self._rows)
        return HeadDraftTokens(self.tokens[:count].reshape(shape), self._probabilities[:count].reshape(shape))


def sample(logits: Tensor, plan: SamplingPlan, mask: TokenMask | None = None) -> NDArray[np.int64]:
    """Sample a token after each row. Returns [R] int64; -1 where logits are not finite.

    logits: [R, V] float32, with penalties and bias; mask: the tokens that grammars allow
    """
    assert logits.is_contiguous(), "the kernel reads contiguous rows"
    assert logits.dtype == torch.float32, "the kernel reads float32"
    assert len(logits) >= len(plan.positions), "each position has a row"
    samples = SampledRows(logits.data_ptr(), logits.shape[1], plan, mask)
    library.load().outrider_sample(shared_pool().handle, samples.pointer)
    return samples.tokens
