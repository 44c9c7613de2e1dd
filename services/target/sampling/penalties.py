"""Penalties and bias: changes of a session's logits by its own tokens, applied token by token, not over the vocabulary.

A session with penalties keeps `PenaltyCounts`, with one entry for each token that occurs; a commit touches only the
entries of its tokens. All logits rows of the session share these entries. The row of a draft token differs in the
tokens on its own path below the root, and has entries of its own for these few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.speculation.sampling import SamplingParams
from outrider.speculation.tree import ROOT, TreeSlice
from services.target.step.upload import UploadBatch


class PenaltyCounts:
    """The changes of one session's logits after its committed tokens: a scale and a shift for each of D tokens."""

    def __init__(self, params: SamplingParams, tokens: NDArray[np.integer], prompt_length: int) -> None:
        """tokens: prompt and committed tokens."""
        self._params = params
        self._bias = dict(params.logit_bias)
        self._entries: dict[int, int] = {}
        self._counts: list[int] = []  # occurrences after the prompt
        self.size = 0
        self._tokens = np.empty(64, np.int64)
        self._scales = np.empty(64)
        self._shifts = np.empty(64)
        for token in self._bias:
            self._add(token, 1.0)
        if params.repetition_penalty != 1.0:
            for token in np.unique(tokens[:prompt_length]).tolist():
                entry = self._entry(token)  # before indexing, because it may reallocate the columns
                self._scales[entry] = params.repetition_penalty
        self.append(tokens[prompt_length:])

    def append(self, tokens: NDArray[np.integer]) -> None:
        """Count committed tokens, [n]."""
        params = self._params
        if not params.counts and params.repetition_penalty == 1.0:
            return
        for token in tokens.tolist():
            entry = self._entry(token)
            self._counts[entry] += 1
            self._scales[entry] = params.repetition_penalty
            self._shifts[entry] = params.shift(self._bias.get(token, 0.0), self._counts[entry])

    def shared(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Tokens, scales and shifts of all rows, each [D]. Views."""
        return self._tokens[: self.size], self._scales[: self.size], self._shifts[: self.size]

    def own(self, draft: TreeSlice) -> list[tuple[int, int, float, float]]:
        """(row, token, scale, shift) of the tokens on the nodes' own paths. Row 0 is the root, i + 1 node i."""
        params = self._params
        if not params.counts and params.repetition_penalty == 1.0:
            return []
        entries: list[tuple[int, int, float, float]] = []
        paths: list[Counter[int]] = []
        for node, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
            path = Counter[int]() if parent == ROOT else paths[parent].copy()
            path[token] += 1
            paths.append(path)
            for own, drafted in path.items():
                known = self._entries.get(own)
                count = drafted + (0 if known is None else self._counts[known])
                shift = params.shift(self._bias.get(own, 0.0), count)
                entries.append((node + 1, own, params.repetition_penalty, shift))
        return entries

    def _entry(self, token: int) -> int:
        entry = self._entries.get(token)
        return self._add(token, 1.0) if entry is None else entry

    def _add(self, token: int, scale: float) -> int:
        entry = self.size
        if entry == len(self._tokens):
            self._tokens, self._scales, self._shifts = (
                np.concatenate([column, np.empty_like(column)]) for column in (self._tokens, self._scales, self._shifts)
            )
        self._entries[token] = entry
        self._counts.append(0)
        self._tokens[entry], self._scales[entry] = token, scale
        self._shifts[entry] = self._params.shift(self._bias.get(token, 0.0), 0)
        self.size += 1
        return entry


@dataclass(frozen=True)
class Adjustments:
    """Changes of a step's logits, on the device.

    tokens, scales, shifts: [D] int64, float64, float64: the shared entries of all sessions, one session after another
    rows, firsts, sizes: [n] int64: rows with shared entries, the first entry of each, and their number
    own_rows, own_tokens, own_scales, own_shifts: [m]: entries of single rows, which replace shared ones
    pairs: sum of sizes
    """

    tokens: Tensor
    scales: Tensor
    shifts: Tensor
    rows: Tensor
    firsts: Tensor
    sizes: Tensor
    own_rows: Tensor
    own_tokens: Tensor
    own_scales: Tensor
    own_shifts: Tensor
    pairs: int = field(kw_only=True)


def gather(sessions: Sequence[tuple[int, PenaltyCounts, TreeSlice]], device: torch.device) -> Adjustments | None:
    """Lay out the entries of a step's sessions; None if there are none. sessions: first row, counts, draft."""
    uploads = UploadBatch()
    adjustments = lay_out(sessions, uploads)
    uploads.send(device)
    return adjustments()


def lay_out(
    sessions: Sequence[tuple[int, PenaltyCounts, TreeSlice]], uploads: UploadBatch
) -> Callable[[], Adjustments | None]:
    """As `gather`, as part of a larger upload. The result may be called once the upload is sent."""
    shared = [tally.shared() for _, tally, _ in sessions]
    own = [(first + row, *entry) for first, tally, draft in sessions for row, *entry in tally.own(draft)]
    if not own and not any(len(columns[0]) for columns in shared):
        return lambda: None
    counts = np.array([len(draft) + 1 for _, _, draft in sessions])
    sizes = np.array([len(columns[0]) for columns in shared])
    rows = np.concatenate([np.arange(first, first + len(draft) + 1) for first, _, draft in sessions])
    own_rows, own_tokens, own_scales, own_shifts = zip(*own, strict=True) if own else ((), (), (), ())

    columns: list[NDArray[np.generic]] = [
        *(np.concatenate(columns) for columns in zip(*shared, strict=True)),
        rows,
        np.repeat(np.cumsum(sizes) - sizes, counts),
        np.repeat(sizes, counts),
        np.array(own_rows, np.int64),
        np.array(own_tokens, np.int64),
        np.array(own_scales, np.float64),
        np.array(own_shifts, np.float64),
    ]
    placed, pairs = uploads.add(columns), int(sizes @ counts)
    return lambda: Adjustments(*placed(), pairs=pairs)


def apply(logits: Tensor, adjustments: Adjustments) -> None:
    """Change logits in place. logits: [R, V] float32."""
    a = adjustments
    # A row's own entries start from the model's logits and replace the shared ones.
    own = _adjusted(logits[a.own_rows, a.own_tokens], a.own_scales, a.own_shifts)
    row = torch.repeat_interleave(a.sizes, output_size=a.pairs)  # [pairs] index into rows
    entry = torch.arange(a.pairs, device=logits.device) - (a.sizes.cumsum(0) - a.sizes - a.firsts)[row]
    place = (a.rows[row], a.tokens[entry])
    logits.index_put_(place, _adjusted(logits[place], a.scales[entry], a.shifts[entry]))
    logits.index_put_((a.own_rows, a.own_tokens), own)


def _adjusted(logits: Tensor, scales: Tensor, shifts: Tensor) -> Tensor:
    x = logits.double()
    return (torch.where(x > 0, x / scales, x * scales) + shifts).float()
