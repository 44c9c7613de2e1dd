"""Rank 0's runner: the other ranks do with it what the engine asks of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from services.target.kernels.dispatch import Planner
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Outputs
from services.target.model.cuda.graphs import GraphRunner
from services.target.process.ranks.batches import pack, share_unknown
from services.target.process.ranks.channel import Channel, Kind
from services.target.process.ranks.updates import SlotRunner, update_all
from services.target.step.batch import Batch, Capture


class LeadingRunner:
    """A `Runner` of the whole model, of which this process computes a part. Logits and states are the whole ones."""

    def __init__(self, runner: SlotRunner, channel: Channel, device: torch.device) -> None:
        """runner: of this rank's part."""
        self.runner, self._channel, self._device = runner, channel, device
        self._cache: KVCache | None = None

    def forward(self, batch: Batch, cache: KVCache) -> Outputs:
        """As any runner: every rank computes its part of the same batch over its own cache."""
        self._share_cache(cache)
        self._channel.send(Kind.BATCH, *pack(batch))
        share_unknown(batch, self._channel)
        return self.runner.forward(batch, cache)

    @property
    def planner(self) -> Planner:
        """The planner of this rank's part."""
        return self.runner.planner

    @torch.inference_mode()
    def capture(self, cache: KVCache, device: torch.device) -> None:
        """Capture steps as CUDA graphs on all ranks, where steps are captured."""
        if isinstance(self.runner, GraphRunner):
            self._share_cache(cache)
            self._channel.send(Kind.CAPTURE)
            self.runner.capture(cache, device)

    def expect(self, capture: Capture) -> None:
        """As `CapturesSteps.expect`, on all ranks."""
        if isinstance(self.runner, GraphRunner):
            self._channel.send(Kind.CAPTURE, np.array([int(capture.final), *capture.layers]))
            self.runner.expect(capture)

    @property
    def due(self) -> int:
        """As `CapturesSteps.due`."""
        return self.runner.due if isinstance(self.runner, GraphRunner) else 0

    def capture_next(self) -> None:
        """As `CapturesSteps.capture_next`, on all ranks."""
        assert isinstance(self.runner, GraphRunner), "a step is due"
        self._channel.send(Kind.CAPTURE, np.array([-1]))
        self.runner.capture_next()

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the whole model's weights."""
        return self.runner.weights()

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace weights on all ranks. Raises ConfigError if one cannot take them; then none has changed."""
        update_all(tensors, self.runner, self._device, self._channel)

    def tell_groups(self, message: bytes) -> None:
        """Send what a trainer's process group does to the other ranks."""
        self._channel.send(Kind.GROUP, np.frombuffer(message, np.uint8))

    def _share_cache(self, cache: KVCache) -> None:
        """Make a new cache on the other ranks, too."""
        if cache is not self._cache:
            self._cache = cache
            self._channel.send(Kind.CACHE, np.array([cache.pages, cache.page_size]))
            cache.on_move = self._move

    def _move(self, moves: Tensor) -> None:
        self._channel.send(Kind.MOVE, np.array(moves.shape))
        self._channel.share(moves.contiguous())
