"""The tokens that grammars allow after each sampled row of a step, as bits on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenMask:
    """rows: [M] int64; words: [M, ceil(V / 32)] int32, bit i of word j is token 32 j + i. On the device."""

    rows: Tensor
    words: Tensor
