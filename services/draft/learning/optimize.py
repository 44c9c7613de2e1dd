"""The optimizer's life: steps of AdamW over batches, with a learning rate that rises and falls; checkpoints.

A step adds the slopes of several batches, so that memory is bounded by one of them. A run that goes on from a
checkpoint takes the very steps that it would have taken: which batch is next follows from the number of steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

from outrider.errors import ConfigError
from services.draft.learning.batches import Batch
from services.draft.learning.objective import Objective, Shared
from services.draft.model.layers.heads import Params

CHECKPOINT = "state.safetensors"  # in a folder of checkpoints
_CLIP = 1.0  # largest norm of all slopes together
_BETAS = 0.9, 0.95
_FLOOR = 0.02  # of the highest learning rate, at the end


@dataclass(frozen=True)
class Schedule:
    """steps: of the optimizer; rate: highest learning rate; warmup: part of the steps in which it rises; decay: of
    matrices; batches: of a step
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
        """AdamW with clipped slopes."""
        decayed = {"weight_decay": self.decay, "mask": lambda params: jax.tree.map(_is_matrix, params)}
        adam = optax.adamw(self.rates(), *_BETAS, **decayed)
        return optax.chain(optax.clip_by_global_norm(_CLIP), adam)


@dataclass(frozen=True)
class Steady(Schedule):
    """A training without an end: the rate rises over `steps`, and stays."""

    def rates(self) -> optax.Schedule:
        """The learning rate by step."""
        return optax.linear_schedule(self.rate / self.steps, self.rate, self.steps)


def _is_matrix(array: Any) -> bool:
    return bool(array.ndim == 2)


class State(NamedTuple):
    """params: float32; moments: of the optimizer."""

    params: Params
    moments: Any


class Done(NamedTuple):
    """What a step was like. losses: mean cross entropy by tokens ahead; rows: that were learnt from."""

    losses: np.ndarray[Any, Any]
    rows: int


class Trainer:
    """Takes steps. `step` counts those that were taken."""

    def __init__(self, objective: Objective, schedule: Schedule, shared: Shared, params: Params) -> None:
        """params: to begin with."""
        self._objective, self._schedule, self._shared = objective, schedule, shared
        self._optimizer = schedule.optimizer()
        self.state = State(params, self._optimizer.init(params))
        self.step = 0
        self._slopes = jax.jit(jax.value_and_grad(objective, has_aux=True))
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._apply = jax.jit(self._applied, donate_argnums=0)

    def _applied(self, state: State, slopes: Params, rows: jax.Array) -> State:
        mean = jax.tree.map(lambda slope: slope / jnp.maximum(rows, 1), slopes)
        updates, moments = self._optimizer.update(mean, state.moments, state.params)
        return State(optax.apply_updates(state.params, updates), moments)

    @property
    def batches_taken(self) -> int:
        """Batches that all steps so far have taken."""
        return self.step * self._schedule.batches

    def take_step(self, batches: Iterator[Batch]) -> Done:
        """One step of the optimizer."""
        total: Any = None
        for _ in range(self._schedule.batches):
            (_, tally), slopes = self._slopes(self.state.params, self._shared, next(batches))
            total = (slopes, tally) if total is None else self._add(total, (slopes, tally))
        slopes, tally = total
        self.state = self._apply(self.state, slopes, tally.counts[0])
        self.step += 1
        counts = np.asarray(tally.counts)
        return Done(np.asarray(tally.losses) / np.maximum(counts, 1), int(counts[0]))

    def restart(self, params: Params) -> None:
        """Go on from other parameters, without momentum. They are the trainer's from now on."""
        self.state = State(params, self._optimizer.init(params))

    # --- checkpoints ---

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        """Write the state, in one piece or not at all. facts: what `load` gives back."""
        folder.mkdir(parents=True, exist_ok=True)
        leaves = {f"{i:04}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(self.state))}
        part = folder / "state.part"
        try:
            save_file(leaves, part, {"facts": json.dumps(facts | {"step": self.step})})
            part.replace(folder / CHECKPOINT)
        finally:
            part.unlink(missing_ok=True)  # what there is of it would only take room

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Go on where a checkpoint ends. Returns its facts; None if there is none. Raises ConfigError."""
        file, facts = folder / CHECKPOINT, saved_facts(folder)
        if facts is None:
            return None
        leaves, structure = jax.tree.flatten(self.state)
        saved = load_file(file)
        arrays = [saved.get(f"{i:04}") for i in range(len(leaves))]
        for array, leaf in zip(arrays, leaves, strict=True):
            if array is None or array.shape != leaf.shape:
                raise ConfigError(f"{file} is a checkpoint of another head; remove it to begin anew")
        self.state = jax.tree.unflatten(structure, [jnp.asarray(array) for array in arrays])
        self.step = int(facts["step"])
        return facts


def saved_facts(folder: Path) -> dict[str, Any] | None:
    """The facts in a folder's checkpoint; None if there is none."""
    file = folder / CHECKPOINT
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    facts: dict[str, Any] = json.loads(header["__metadata__"]["facts"])
    return facts
