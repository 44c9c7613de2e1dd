"""Captured states whose fusion is deferred: many steps are fused in one product, while drafting is paused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.serving.scheduler import Chunk
from services.target.features.fusion import Fusion
from services.target.step.batch import Capture


class _Step(NamedTuple):
    """A step's states, chunk after chunk. states: [rows, W]."""

    chunks: Sequence[Chunk]
    capture: Capture
    states: Tensor


class DeferredStates:
    """States of steps that are not fused yet. rows: their number."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self.rows = 0

    def add(self, chunks: Sequence[Chunk], capture: Capture, states: Tensor) -> None:
        """Add the states of some chunks, [rows, W], one chunk after another."""
        self._steps.append(_Step(chunks, capture, states))
        self.rows += len(states)

    def includes(self, session_id: int) -> bool:
        """True if states of a session are among them."""
        return any(chunk.session.id == session_id for step in self._steps for chunk in step.chunks)

    def fuse(self, fusion_of: Callable[[int], Fusion | None]) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
        """Fuse all states and forget them. Yields session id, first position, and rows as they are on the wire.

        fusion_of: a session's fusion; None for sessions that want no features
        """
        steps, self._steps, self.rows = self._steps, [], 0
        found: dict[Fusion, dict[int, list[tuple[int, Tensor]]]] = {}
        for chunks, capture, states in steps:
            for chunk, part in zip(chunks, states.split([len(chunk) for chunk in chunks]), strict=True):
                session_id = chunk.session.id
                if (fusion := fusion_of(session_id)) is not None:
                    own = fusion.select(part, capture)
                    found.setdefault(fusion, {}).setdefault(session_id, []).append((chunk.start, own))
        for fusion, parts in found.items():
            rows = fusion.apply(torch.cat([own for owned in parts.values() for _, own in owned])).cpu().numpy()
            for session_id, owned in parts.items():
                for first, count in _runs([(start, len(own)) for start, own in owned]):
                    yield session_id, first, rows[:count]
                    rows = rows[count:]


def _runs(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge parts that follow one another. parts: (first position, rows)."""
    runs: list[tuple[int, int]] = []
    for first, count in parts:
        if runs and sum(runs[-1]) == first:
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        else:
            runs.append((first, count))
    return runs
