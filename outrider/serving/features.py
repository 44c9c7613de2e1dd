"""Features: hidden states of the target for feature-based drafters, as specifications, blocks and rows of bytes.

    specification   layers, fusion and number format that a drafter reads
    block           consecutive rows of one session; row j belongs to the token at position j
    row             BFLOAT16, FLOAT32:  width numbers
                    FLOAT8_E4M3:        a float32 scale, then width numbers of one byte; value = number times scale

All numbers are little-endian. The gateway relays blocks without reading their rows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidRequest

# Maximum size of the rows in a frame: far below the largest message, so that features do not delay commits.
FRAME_BYTES = 4 << 20
# Maximum size of the rows that wait for a slow reader; further rows are dropped, and the drafter sees the gap.
BACKLOG_BYTES = 256 << 20

FLOAT8_MAX = 448.0  # largest finite number in e4m3
_SCALE_BYTES = 4


class FeatureFormat(IntEnum):
    """Number format of a row. Values as in the protocol."""

    BFLOAT16 = 1
    FLOAT8_E4M3 = 2
    FLOAT32 = 3


@dataclass(frozen=True)
class FeatureSpec:
    """Hidden states that a drafter reads.

    layers:  ascending; i is the residual stream that enters the target's decoder layer i, L (the number of layers) the
             output of the last layer, before the final norm. Empty without `final`: EAGLE-3's {2, L/2, L-3}
    final:   also the state after the final norm, as the last one
    norm_epsilon: of the RMS norms in the fusion

    The states are concatenated. The target applies the fusion, if there is one, before it sends them: a safetensors
    file with fc.weight [H, n * Ht] and, depending on the drafter, fc.bias [H], and either fc_norm.0.weight [Ht],
    fc_norm.1.weight, ... (one for each state) or norm_before_fc.weight [n * Ht].
    """

    layers: tuple[int, ...] = ()
    final: bool = False
    format: FeatureFormat = FeatureFormat.BFLOAT16
    norm_epsilon: float = 1e-6

    def in_format(self, layout: FeatureFormat) -> FeatureSpec:
        """The same states in another number format."""
        return replace(self, format=layout)

    def id(self, fusion: bytes) -> int:
        """Hash of the specification and its fusion, 64 bits, never 0."""
        facts = (list(self.layers), self.final, int(self.format), self.norm_epsilon)
        digest = hashlib.sha256(repr(facts).encode() + fusion).digest()
        return int.from_bytes(digest[:8], "little") or 1


@dataclass(frozen=True)
class FeatureBlock:
    """Rows of one session. first: position of the first row, in tokens. rows: [n, row bytes] uint8.

    spec_id: id of their FeatureSpec
    """

    session_id: int
    first: int
    rows: NDArray[np.uint8]
    spec_id: int = 0


def row_bytes(width: int, layout: FeatureFormat) -> int:
    """Size of a row of `width` numbers, in bytes."""
    sizes = {FeatureFormat.BFLOAT16: 2 * width, FeatureFormat.FLOAT32: 4 * width}
    return sizes.get(layout, _SCALE_BYTES + width)


def decode(rows: NDArray[np.uint8], layout: FeatureFormat) -> NDArray[np.float32]:
    """The numbers of rows. rows: [n, row bytes]. Returns [n, width]. Raises InvalidRequest for an impossible size."""
    rows = np.ascontiguousarray(rows)
    size = rows.shape[1]
    if layout is FeatureFormat.FLOAT8_E4M3 and size > _SCALE_BYTES:
        scales = np.ascontiguousarray(rows[:, :_SCALE_BYTES]).view(np.float32)
        scaled: NDArray[np.float32] = _float8_values()[rows[:, _SCALE_BYTES:]] * scales
        return scaled
    if layout is FeatureFormat.BFLOAT16 and size % 2 == 0:
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if layout is FeatureFormat.FLOAT32 and size % 4 == 0:
        return rows.view(np.float32)
    raise InvalidRequest(f"rows of {size} bytes cannot be rows in {layout.name}")


@functools.cache
def _float8_values() -> NDArray[np.float32]:
    """The number of each byte: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[byte & 127 == 127] = np.nan
    return np.where(byte & 128, -size, size).astype(np.float32)


def cut(blocks: Sequence[FeatureBlock], limit: int = FRAME_BYTES) -> tuple[list[FeatureBlock], list[FeatureBlock]]:
    """Split blocks in two: the first `limit` bytes, but at least one row, and the rest. Blocks are cut between rows."""
    head: list[FeatureBlock] = []
    room = limit
    for index, block in enumerate(blocks):
        size = block.rows.shape[1]
        fitting = max(room // size, 0 if head else 1) if size else len(block.rows)
        if fitting < len(block.rows):
            rest = list(blocks[index + 1 :])
            if fitting:
                head.append(replace(block, rows=block.rows[:fitting]))
            return head, [replace(block, first=block.first + fitting, rows=block.rows[fitting:]), *rest]
        head.append(block)
        room -= block.rows.nbytes
    return head, []
