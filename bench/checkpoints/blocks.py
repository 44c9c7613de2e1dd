"""Random blocks of llama.cpp's quantized types, of weights with a chosen spread.

Values are random bytes, and only the scales are chosen, so that a gigabyte of weights takes seconds: no float is
quantized. Layouts are those of ggml-common.h in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

_VARIANTS = 4096  # of the scales; each block takes one
Bytes = NDArray[np.uint8]


def random_rows(kind: Type, rows: int, inputs: int, spread: float, rng: np.random.Generator) -> Bytes:
    """Rows of a weight in a quantized type, [rows, bytes of a row].

    spread: standard deviation of the weights, whose mean is about 0
    """
    block, size = GGML_QUANT_SIZES[kind]
    assert inputs % block == 0, "rows are whole blocks"
    count = rows * inputs // block
    blocks = np.frombuffer(bytearray(rng.bytes(count * size)), np.uint8).reshape(count, size)
    _FILL[kind](blocks, spread, rng)
    return blocks.reshape(rows, -1)


def _halves(numbers: NDArray[np.float64]) -> Bytes:
    """Half-precision numbers as bytes, [n, 2]."""
    return numbers.astype(np.float16).view(np.uint8).reshape(-1, 2)


def _factors(count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Factors about 1, so that blocks differ."""
    return rng.uniform(0.75, 1.25, count)


def _with_scale(levels: int, *, minimum: bool) -> Callable[[Bytes, float, np.random.Generator], None]:
    """Blocks that begin with a scale, and maybe a minimum: w = scale * (q - middle) or scale * q + minimum."""
    deviation = np.sqrt((levels**2 - 1) / 12)  # of q

    def fill(blocks: Bytes, spread: float, rng: np.random.Generator) -> None:
        scales = spread / deviation * _factors(_VARIANTS, rng)
        if minimum:
            head = np.concatenate([_halves(scales), _halves(-(levels - 1) / 2 * scales)], 1)
        else:  # q - middle is -0.5 on average: with one sign, all outputs would have a part in common, and texts repeat
            head = _halves(scales * rng.choice((-1, 1), _VARIANTS))
        blocks[:, : head.shape[1]] = head[rng.integers(0, _VARIANTS, len(blocks))]

    return fill


def _q8_0(blocks: Bytes, spread: float, rng: np.random.Generator) -> None:
    blocks[:, :2] = _halves(spread / 73.6 * _factors(_VARIANTS, rng))[rng.integers(0, _VARIANTS, len(blocks))]
    values = blocks[:, 2:]
    values[values == 128] = 0  # no quantizer writes -128


def _with_steps(levels: int) -> Callable[[Bytes, float, np.random.Generator], None]:
    """Blocks of Q4_K and Q5_K: w = d * scale * q - dmin * minimum, with 6 bits a scale and minimum of each 32."""
    deviation = np.sqrt((levels**2 - 1) / 12)

    def fill(blocks: Bytes, spread: float, rng: np.random.Generator) -> None:
        scales = rng.integers(32, 64, (_VARIANTS, 8), np.uint8)
        minima = np.clip(scales.astype(np.int8) + rng.integers(-1, 2, scales.shape, np.int8), 0, 63).astype(np.uint8)
        d = spread / (deviation * 47.5) * _factors(_VARIANTS, rng)
        first = (scales[:, :4] & 63) | (scales[:, 4:] >> 4 << 6)
        second = (minima[:, :4] & 63) | (minima[:, 4:] >> 4 << 6)
        third = (scales[:, 4:] & 15) | (minima[:, 4:] << 4)
        head = np.concatenate([_halves(d), _halves((levels - 1) / 2 * d), first, second, third], 1)
        blocks[:, : head.shape[1]] = head[rng.integers(0, _VARIANTS, len(blocks))]

    return fill


def _q6_k(blocks: Bytes, spread: float, rng: np.random.Generator) -> None:
    """w = d * scale * (q - 32), with 8 bits a scale of each 16."""
    scales = rng.integers(64, 128, (_VARIANTS, 16)) * rng.choice((-1, 1), (_VARIANTS, 16))
    d = spread / (np.sqrt((64**2 - 1) / 12) * 95.5) * _factors(_VARIANTS, rng)
    tail = np.concatenate([scales.astype(np.int8).view(np.uint8), _halves(d)], 1)
    blocks[:, -tail.shape[1] :] = tail[rng.integers(0, _VARIANTS, len(blocks))]


_FILL: dict[Type, Callable[[Bytes, float, np.random.Generator], None]] = {
    Type.Q4_0: _with_scale(16, minimum=False),
    Type.Q4_1: _with_scale(16, minimum=True),
    Type.Q5_0: _with_scale(32, minimum=False),
    Type.Q5_1: _with_scale(32, minimum=True),
    Type.Q8_0: _q8_0,
    Type.Q4_K: _with_steps(16),
    Type.Q5_K: _with_steps(32),
    Type.Q6_K: _q6_k,
}
TYPES = tuple(_FILL)
"""The types that `random_rows` writes."""
