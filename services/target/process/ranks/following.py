"""What the ranks other than 0 do: everything that rank 0 sends, in order."""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray

from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model
from services.target.model.cuda.graphs import GraphRunner
from services.target.process.ranks import updates
from services.target.process.ranks.batches import unpack
from services.target.process.ranks.channel import Channel, Kind
from services.target.process.ranks.updates import StagedWeights

log = logging.getLogger(__name__)


class Follower:
    """One rank's part of the model, driven by rank 0."""

    def __init__(self, model: Model, channel: Channel) -> None:
        self._model, self._channel = model, channel
        self._cache: KVCache | None = None
        self._staged: StagedWeights | None = None  # of the weight update under way

    @torch.inference_mode()
    def run(self) -> None:
        """Work until rank 0 sends the end."""
        work = {
            Kind.CACHE: self._make_cache,
            Kind.CAPTURE: self._capture,
            Kind.BATCH: self._compute,
            Kind.MOVE: self._move,
            Kind.STAGE: self._stage,
            Kind.SETTLE: self._settle,
        }
        while True:
            kind, body = self._channel.receive()
            if kind is Kind.END:
                return
            work[kind](body)

    @property
    def cache(self) -> KVCache:
        """The present cache."""
        assert self._cache is not None, "a cache comes before all else"
        return self._cache

    def _make_cache(self, body: NDArray[np.int64]) -> None:
        self._cache = None  # frees it before the new one is allocated
        pages, page_size = body.tolist()
        self._cache = self._model.new_cache(pages, page_size)

    def _capture(self, _: NDArray[np.int64]) -> None:
        assert isinstance(self._model.runner, GraphRunner), "all ranks have the same kind of runner"
        self._model.runner.capture(self.cache, self._model.device)

    def _compute(self, body: NDArray[np.int64]) -> None:
        self._model.runner.forward(unpack(body, self._model.device, self._channel), self.cache)

    def _move(self, body: NDArray[np.int64]) -> None:
        moves = torch.empty(body.tolist(), dtype=torch.int64, device=self._model.device)
        self._channel.share(moves)
        self.cache.repeat(moves)

    def _stage(self, body: NDArray[np.int64]) -> None:
        updates.receive(body, self._staging, self._model.device, self._channel)

    def _settle(self, _: NDArray[np.int64]) -> None:
        problem = self._staging.settle(self._channel)
        self._staged = None
        if problem:
            log.warning("the weights have not changed on any rank: %s", problem)

    @property
    def _staging(self) -> StagedWeights:
        if self._staged is None:
            self._staged = StagedWeights(updates.slotted(self._model.runner))
        return self._staged
