"""New weights for the serving programs: converted beside the old ones, installed between two steps.

    training thread    trained weights, float32 ──► number format, quantization, panels ──► handoff
    engine's thread    before a step: installs the weights of the handoff, all at once

The conversion is that of the start-up, so the new weights have the shapes, formats and placement of the old ones, the
same programs run on, and nothing is compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from services.draft.model.matrices.packed import pack_params
from services.draft.model.matrices.quantized import quantization_format, quantize_params
from services.draft.model.parallel.devices import host_device
from services.draft.model.params import Params
from services.draft.model.weights.arrays import putter


class LearntWeights(NamedTuple):
    """A head's trained parameters, float32, and the target's id of each entry of its vocabulary, [n]."""

    params: Params
    ids: NDArray[np.int64]


class ServedWeights(NamedTuple):
    """The weights of a step. params: the model's; fusion: of the fusion layer."""

    params: Params
    fusion: Params


@dataclass(frozen=True)
class WeightFormat:
    """The format of served weights. quantization: the flag's value; panels: packed for the compiled CPU kernels."""

    dtype: DTypeLike
    quantization: str | None
    panels: bool

    def converted(self, learnt: Params) -> Params:
        """Trained parameters for the service, with the fusion if the draft service applies it."""
        put = putter(self.dtype)

        def load() -> Params:
            loaded: Params = jax.tree.map(lambda array: put(np.asarray(array)), learnt)
            return loaded

        if quantization_format(self.quantization) is None:
            converted = load()
        else:
            with jax.default_device(host_device()):
                converted = _each(load(), lambda part: quantize_params(part, self.quantization))
            converted = jax.tree.map(lambda array: jnp.asarray(np.asarray(array)), converted)
        return _each(converted, pack_params) if self.panels else converted


def _each(params: Params, change: Callable[[Params], Params]) -> Params:
    """Apply a function to the model's parameters and to those of the fusion, if there are any."""
    own = {name: value for name, value in params.items() if name != "fusion"}
    return change(own) | {name: change(value) for name, value in params.items() if name == "fusion"}


class WeightHandoff:
    """Passes new weights from one thread to another; later weights replace those that were not taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: ServedWeights | None = None

    def put(self, served: ServedWeights) -> None:
        """Offer weights that are ready to be used."""
        with self._lock:
            self._served = served

    def take(self) -> ServedWeights | None:
        """The offered weights, once; None without any."""
        if self._served is None:  # the common case needs no lock
            return None
        with self._lock:
            served, self._served = self._served, None
        return served
