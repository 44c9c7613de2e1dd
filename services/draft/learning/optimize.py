"""The optimizer: steps of AdamW over batches with a schedule of the learning rate, and checkpoints.

A step accumulates the gradients of several batches, so that a single batch bounds the memory. A run that resumes from a
checkpoint takes the same steps as an uninterrupted one: the number of steps determines the next batch.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from outrider.checkpoints.disk import put_in_place
from outrider.errors import ConfigError
from services.draft.learning.data_parallel import DataParallel
from services.draft.learning.objective import LossSums, Objective, TargetWeights
from services.draft.learning.records.batches import Batch
from services.draft.model.params import Params

CHECKPOINT = "state.safetensors"  # in a folder of checkpoints
_CLIP = 1.0  # largest global norm of the gradients
_BETAS = 0.9, 0.95
_FLOOR = 0.02  # final learning rate over the highest one

_T = TypeVar("_T")


@dataclass(frozen=True)
class Schedule:
    """steps: of the optimizer; rate: highest learning rate; warmup: fraction of the steps in which it rises; decay:
    weight decay of matrices; batches: of a step
    """

    steps: int
    rate: float
    warmup: float
    decay: float
    batches: int

    def rates(self) -> optax.Schedule:
        """The learning rate by step."""
        rises = max(1, math.ceil(self.steps * self.warmup))
        return optax.warmup_cosine_decay_schedule(
            self.rate / rises, self.rate, rises, max(self.steps, rises + 1), self.rate * _FLOOR
        )

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW with clipped gradients."""
        decayed = {"weight_decay": self.decay, "mask": lambda params: jax.tree.map(_is_matrix, params)}
        adam = optax.adamw(self.rates(), *_BETAS, **decayed)
        return optax.chain(optax.clip_by_global_norm(_CLIP), adam)


@dataclass(frozen=True)
class ConstantSchedule(Schedule):
    """A schedule without end: the rate rises over `steps`, then stays constant."""

    def rates(self) -> optax.Schedule:
        """The learning rate by step."""
        return optax.linear_schedule(self.rate / self.steps, self.rate, self.steps)


def _is_matrix(array: Any) -> bool:
    return bool(array.ndim == 2)


class TrainState(NamedTuple):
    """params: float32; moments: state of the optimizer."""

    params: Params
    moments: Any


class StepResult(NamedTuple):
    """Results of a step. Reading them waits for the device: read those of the step before, and it never rests."""

    sums: LossSums

    @property
    def losses(self) -> NDArray[np.float32]:
        """Mean cross entropy by unroll step."""
        means: NDArray[np.float32] = np.asarray(self.sums.losses) / np.maximum(np.asarray(self.sums.counts), 1)
        return means

    @property
    def rows(self) -> int:
        """Trained rows."""
        return int(self.sums.counts[0])


class Trainer:
    """Takes optimizer steps. `step` counts them."""

    state: TrainState

    def __init__(
        self,
        objective: Objective,
        schedule: Schedule,
        target: TargetWeights,
        params: Params,
        parallel: DataParallel | None = None,
    ) -> None:
        """params: initial ones; parallel: devices that share the batches, of one device by default."""
        self._objective, self._schedule, self._parallel = objective, schedule, parallel
        self._optimizer = schedule.optimizer()
        self.follow(target)
        self.restart(params)
        self.step = 0
        gradients = jax.value_and_grad(objective, has_aux=True)
        self._gradients = jax.jit(gradients if parallel is None else parallel.summed(gradients))
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._apply = jax.jit(self._applied, donate_argnums=0)

    def _applied(self, state: TrainState, gradients: Params, rows: jax.Array) -> TrainState:
        mean = jax.tree.map(lambda gradient: gradient / jnp.maximum(rows, 1), gradients)
        updates, moments = self._optimizer.update(mean, state.moments, state.params)
        return TrainState(optax.apply_updates(state.params, updates), moments)

    @property
    def target(self) -> TargetWeights:
        """The target's weights that it trains for."""
        return self._target

    @property
    def batches_taken(self) -> int:
        """Batches of all steps so far."""
        return self.step * self._schedule.batches

    def take_step(self, batches: Iterator[Batch]) -> StepResult:
        """One step of the optimizer."""
        total: Any = None
        own = itertools.islice(batches, self._schedule.batches)
        for batch in own if self._parallel is None else self._parallel.split(own):
            (_, sums), gradients = self._gradients(self.state.params, self._target, batch)
            total = (gradients, sums) if total is None else self._add(total, (gradients, sums))
        gradients, sums = total
        self.state = self._apply(self.state, gradients, sums.counts[0])
        self.step += 1
        return StepResult(sums)

    def begin(self, params: Params, schedule: Schedule) -> None:
        """Begin anew at step 0 with another schedule, of as many batches a step."""
        self._schedule, self._optimizer = schedule, schedule.optimizer()
        self._apply = jax.jit(self._applied, donate_argnums=0)
        self.restart(params)
        self.step = 0

    def restart(self, params: Params) -> None:
        """Go on from other parameters, without momentum. The trainer owns them from now on."""
        self.state = self._placed(TrainState(params, self._optimizer.init(params)))

    def follow(self, target: TargetWeights) -> None:
        """Train for other weights of the target from the next step on. Any thread may call."""
        self._target = self._placed(target)

    def _placed(self, tree: _T) -> _T:
        """Arrays where the steps need them."""
        return tree if self._parallel is None else self._parallel.replicated(tree)

    # --- checkpoints ---

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        """Write the state, whole or not at all. facts: returned by `load`."""
        folder.mkdir(parents=True, exist_ok=True)
        leaves = {f"{i:04}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(self.state))}
        part = folder / "state.part"
        try:
            save_file(leaves, part, {"facts": json.dumps(facts | {"step": self.step})})
            put_in_place(part, folder / CHECKPOINT)
        finally:
            part.unlink(missing_ok=True)  # an incomplete file would only use disk space

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Restore the last checkpoint. Returns its facts; None without a checkpoint. Raises ConfigError."""
        file, facts = folder / CHECKPOINT, saved_facts(folder)
        if facts is None:
            return None
        leaves, structure = jax.tree.flatten(self.state)
        saved = load_file(file)
        arrays = [saved.get(f"{i:04}") for i in range(len(leaves))]
        for array, leaf in zip(arrays, leaves, strict=True):
            if array is None or array.shape != leaf.shape:
                raise ConfigError(f"{file} is a checkpoint of another head; remove it to begin anew")
        self.state = self._placed(jax.tree.unflatten(structure, [jnp.asarray(array) for array in arrays]))
        self.step = int(facts["step"])
        return facts


def saved_facts(folder: Path) -> dict[str, Any] | None:
    """The facts of a folder's checkpoint; None without one."""
    file = folder / CHECKPOINT
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    facts: dict[str, Any] = json.loads(header["__metadata__"]["facts"])
    return facts
