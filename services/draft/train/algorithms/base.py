"""What every algorithm says of the head that it trains.

The unrolling, the loss, the optimizer and the evaluation know no algorithm: they see a model as the draft service runs
it (`ModelConfig`), parameters as the service has them, and the feature that the target's states make.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from outrider.serving.features import FeatureSpec
from services.draft.model.config import ModelConfig
from services.draft.model.formats.target import Target
from services.draft.model.heads import Params

Multiply = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Shape:
    """What may be chosen of a head. layers: of the decoder; inner: width of its feed-forward part, None for the
    target's; vocab: entries of the head; aux_layers: of the target, None for the usual ones.
    """

    layers: int = 1
    inner: int | None = None
    vocab: int = 8192
    aux_layers: tuple[int, ...] | None = None


class Algorithm(ABC):
    """One head for one target.

    states: what is collected; the target's last state, behind its final norm, stands last
    model:  as the draft service runs it; its vocabulary is the head's own
    """

    states: FeatureSpec
    model: ModelConfig

    @abstractmethod
    def first_params(self, target: Target, ids: NDArray[np.int64], scales: NDArray[np.float32], seed: int) -> Params:
        """Parameters to begin with, float32.

        ids: the target's of the head's entries; scales: root mean square of each collected state
        """

    @abstractmethod
    def feature(self, params: Params, states: jax.Array) -> jax.Array:
        """What the first layer is fed with, [..., H], of the collected states but the last, [..., n * Ht]."""

    @abstractmethod
    def publish(self, params: Mapping[str, Any], ids: NDArray[np.int64], folder: Path) -> None:
        """Write a folder in the published format. params: NumPy arrays or JAX's."""
