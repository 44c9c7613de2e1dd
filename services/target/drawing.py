"""The draws of a step: what its sessions asked for, row by row, brought to the logits; and what came out.

Between the engine, which knows sessions, and the device, which knows rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.serving.messages import OpenSession
from outrider.serving.session import Session
from outrider.speculation.tree import SpeculationTree
from services.target import penalties, sampler
from services.target.batch import Batch, Work
from services.target.budget import Calibration
from services.target.kv_cache import KVCache
from services.target.model.base import Model
from services.target.penalties import Tally


@dataclass(frozen=True)
class Entry:
    """A session of the engine, its hints, the token ids that end it, and what of its past changes its logits."""

    session: Session
    tree: SpeculationTree
    stop_ids: frozenset[int]
    calibration: Calibration
    tally: Tally | None

    def append(self, tokens: NDArray[np.uint32]) -> None:
        """Commit tokens, [n]."""
        self.session.append(tokens)
        self.tree.commit(tokens)
        if self.tally is not None:
            self.tally.append(tokens)


def tally_of(request: OpenSession) -> Tally | None:
    """What keeps account of a session's tokens, where it asked for penalties or bias."""
    params = request.sampling
    return Tally(params, request.tokens, request.prompt_length) if params.adjusts else None


class Drawing:
    """Draws the tokens of steps with a model."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model = model
        self._cache = cache

    @torch.inference_mode()
    def draw(self, batch: Batch, works: Sequence[Work], entries: Mapping[int, Entry]) -> NDArray[np.int64]:
        """The tokens after the batch's sampled rows, [R]. Waits for the device, the only time in a step.

        works: those whose sessions draw. entries: by session id.
        """
        model = self._model
        if not works:
            model.runner.forward(batch, self._cache)
            return np.empty(0, np.int64)
        drawn = [entries[work.chunk.session.id] for work in works]
        requests = [_request(work, entry) for work, entry in zip(works, drawn, strict=True)]
        rows = sampler.gather(requests, model.device)
        adjustments = self._adjustments(works, drawn)
        tokens = sampler.draw(model.runner.forward(batch, self._cache).logits, rows, adjustments)
        return np.asarray(tokens.cpu().numpy())

    def _adjustments(self, works: Sequence[Work], drawn: Sequence[Entry]) -> penalties.Adjustments | None:
        if all(entry.tally is None for entry in drawn):
            return None
        ends = np.cumsum([len(work.draft) + 1 for work in works]).tolist()
        tallies = [
            (end - len(work.draft) - 1, entry.tally, work.draft)
            for work, entry, end in zip(works, drawn, ends, strict=True)
            if entry.tally is not None
        ]
        return penalties.gather(tallies, self._model.device)


def _request(work: Work, entry: Entry) -> sampler.RowRequest:
    session = work.chunk.session
    depths = [0, *work.draft.depths.tolist()]
    stop_ids = sorted(entry.stop_ids)
    missing = session.stop.min_tokens - session.new_tokens  # new tokens before one may end the session
    banned = [stop_ids if depth < missing else [] for depth in depths]
    return sampler.RowRequest(session.sampling, [session.length + depth for depth in depths], banned)
