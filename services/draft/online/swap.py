"""New weights for the programs that serve: made beside them, taken over between two steps.

    learner's thread    learnt weights, float32 ──► number format, 8 bits, panels ──► offered
    engine's thread     before a step: what was offered takes the place of what there is, all of it at once

What is made has the very shapes, formats and places of what it replaces, for it is made in the same way; so the same
programs run on, and nothing is compiled.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from services.draft.model.layers.heads import Params
from services.draft.model.matrices.narrow import in_panels, narrow, narrows
from services.draft.model.parallel.devices import host_device
from services.draft.model.weights.arrays import putter


class Served(NamedTuple):
    """What a step computes with. params: the model's; fusion: of the target's states."""

    params: Params
    fusion: Params


@dataclass(frozen=True)
class Form:
    """How the service has its weights. quantization: as the flag says it; panels: for the compiled kernels of CPUs."""

    dtype: Any
    quantization: str | None
    panels: bool

    def make(self, learnt: Params, kept: Params) -> Served:
        """learnt: float32, with the fusion if it is the draft's; kept: what is not learnt, as the service has it."""
        made = self._made(learnt)
        fusion = made.pop("fusion", {})
        return Served(kept | made, fusion)

    def _made(self, learnt: Params) -> Params:
        put = putter(self.dtype)

        def load() -> Params:
            return jax.tree.map(lambda array: put(np.asarray(array)), learnt)

        if narrows(self.quantization) is None:
            made = load()
        else:
            with jax.default_device(host_device()):
                made = _each(load(), lambda part: narrow(part, self.quantization))
            made = jax.tree.map(lambda array: jnp.asarray(np.asarray(array)), made)
        return _each(made, in_panels) if self.panels else made


def _each(params: Params, change: Any) -> Params:
    """The same for the model's parameters and for those of the fusion, if there are any."""
    own = {name: value for name, value in params.items() if name != "fusion"}
    return change(own) | {name: change(value) for name, value in params.items() if name == "fusion"}


class Offer:
    """New weights on their way from one thread to another; a later offer replaces one that was not taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: Served | None = None

    def make(self, served: Served) -> None:
        """Offer weights, ready to be used."""
        with self._lock:
            self._served = served

    def take(self) -> Served | None:
        """What is offered, once."""
        if self._served is None:  # most of the time, without a lock
            return None
        with self._lock:
            served, self._served = self._served, None
        return served
