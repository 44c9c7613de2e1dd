"""Drawing tokens with the compiled kernel: those of services.target.sampler, its plain twin, at the price of a read.

A session is packed once; a step hands over the packed sessions and the positions of its rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.speculation.sampling import SamplingParams
from services.target.kernels.cpu import library
from services.target.kernels.cpu.pool import shared_pool
from services.target.masks import Mask

_SAMPLING = struct.Struct("<dddqQ")  # csrc/draw.h


def pack(params: SamplingParams) -> bytes:
    """How the rows of a session are drawn."""
    temperature = 0.0 if params.greedy else params.temperature
    top_k = min(params.top_k, 2**63 - 1)
    return _SAMPLING.pack(temperature, params.top_p, params.min_p, top_k, params.seed)


def draw(
    logits: Tensor,
    sessions: Sequence[bytes],
    counts: NDArray[np.int64],
    positions: NDArray[np.int64],
    mask: Mask | None = None,
) -> NDArray[np.int64]:
    """The token after each row. Returns [R]; -1 where logits are not finite.

    logits: [R, V] float32, with penalties and bias; sessions: packed; counts: [S], rows of each, one session after the
    other; positions: [R], absolute positions of the drawn tokens; mask: what grammars allow
    """
    rows, vocab = logits.shape
    assert logits.is_contiguous(), "the kernel walks through memory in order"
    assert logits.dtype == torch.float32, "the kernel reads these"
    assert positions.dtype == counts.dtype == np.int64, "the kernel reads these"
    assert len(positions) == rows, "one position a row"
    tokens = np.empty(rows, np.int64)
    lines = None
    if mask is not None:
        lines = np.full(rows, -1)
        lines[mask.rows.numpy()] = np.arange(len(mask.rows))
    library.load().outrider_draw(
        shared_pool().handle, logits.data_ptr(), rows, vocab, b"".join(sessions), counts.ctypes.data,
        positions.ctypes.data, None if lines is None else lines.ctypes.data,
        None if mask is None else mask.words.data_ptr(), tokens.ctypes.data,
    )  # fmt: skip
    return tokens
