"""What the ranks other than 0 do: everything that rank 0 sends, in order."""

from __future__ import annotations

import logging

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model
from services.target.model.cuda.graphs import GraphRunner
from services.target.process.ranks import updates
from services.target.process.ranks.batches import unpack
from services.target.process.ranks.channel import Channel, Kind
from services.target.process.ranks.updates import StagedWeights
from services.target.process.weights.groups import OtherRank
from services.target.step.batch import Capture

log = logging.getLogger(__name__)


class Follower:
    """One rank's part of the model, driven by rank 0."""

    def __init__(self, model: Model, channel: Channel) -> None:
        self._model, self._channel = model, channel
        self._cache: KVCache | None = None
        self._staged: StagedWeights | None = None  # of the weight update under way
        self._groups: OtherRank | None = None  # once a trainer has made a group

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
            Kind.GROUP: self._follow_group,
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

    def _capture(self, body: NDArray[np.int64]) -> None:
        """Capture plain steps; with -1 the next step that is due; with other numbers expect states, `final` first."""
        runner = self._model.runner
        assert isinstance(runner, GraphRunner), "all ranks have the same kind of runner"
        if not len(body):
            runner.capture(self.cache, self._model.device)
        elif body[0] < 0:
            runner.capture_next()
        else:
            final, *layers = body.tolist()
            runner.expect(Capture(tuple(layers), bool(final), None))

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

    def _follow_group(self, body: NDArray[np.int64]) -> None:
        if self._groups is None:
            self._groups = OtherRank(dist.get_rank(), self._model.device)
        self._groups.take(body.astype(np.uint8).tobytes())

    @property
    def _staging(self) -> StagedWeights:
        if self._staged is None:
            self._staged = StagedWeights(updates.slotted(self._model.runner))
        return self._staged
