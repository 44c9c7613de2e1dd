"""How many optimizer steps fit into a time: measured on the first batches, whose results are dropped."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np

from services.draft.learning.optimize import Schedule, Trainer
from services.draft.learning.records.ahead import AheadOfTime
from services.draft.learning.records.batches import Batches
from services.draft.model.params import Params

_STEPS = 4  # that are measured


def fitted(
    trainer: Trainer,
    schedule: Schedule,
    batches: Batches,
    seconds: float,
    pauses: int,
    pause: Callable[[Params], object],
) -> Schedule:
    """The schedule with as many of its steps as fit into a time, one at least. The trainer follows it from step 0 on.

    pause: what interrupts the steps `pauses` times, an evaluation
    """
    first = jax.tree.map(np.array, trainer.state.params)  # copies: a step gives its memory away
    steps = min(_STEPS, schedule.steps)
    for _ in range(2):  # the first round compiles
        with AheadOfTime(itertools.islice(batches.since(0), steps * schedule.batches)) as stream:
            began = time.monotonic()
            for _ in range(steps):
                trainer.take_step(stream)
            jax.block_until_ready(trainer.state)
            stepping = (time.monotonic() - began) / steps
        began = time.monotonic()
        pause(trainer.state.params)
        paused = pauses * (time.monotonic() - began)
    count = max(1, int((seconds - paused) / stepping))
    schedule = replace(schedule, steps=min(schedule.steps, count))
    trainer.begin(jax.tree.map(jax.numpy.asarray, first), schedule)
    return schedule
