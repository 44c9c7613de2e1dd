"""Compacting the cache after a step: the rows of an accepted path move up to where they belong as committed tokens.

slots of a step     length + 0, length + 1, ...: draft nodes, in slice order
accepted path       p1 < p2 < ...: the row of p(d) belongs at length + d - 1, which is never behind it
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.serving.session import Session
from services.target.kv_cache import KVCache
from services.target.upload import upload


class Moves:
    """The moves of a step, gathered session by session."""

    def __init__(self) -> None:
        self._pairs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

    def add(self, session: Session, path: Sequence[int]) -> None:
        """A session accepts some of its nodes, and has not committed them yet."""
        nodes = np.array(path, dtype=np.int64)
        away = nodes != np.arange(len(nodes))
        if away.any():
            slots = session.table.slots(session.length, session.length + int(nodes[-1]) + 1)
            self._pairs.append((slots[nodes[away]], slots[: len(nodes)][away]))

    @torch.inference_mode()
    def make(self, cache: KVCache, device: torch.device) -> None:
        """Move rows for all sessions at once. Pages given back must not have been leased again before this."""
        if self._pairs:
            sides = [np.concatenate(side) for side in zip(*self._pairs, strict=True)]
            cache.move(*upload(sides, device))
