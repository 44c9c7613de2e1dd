"""Online training: one step at a time, evaluated on sessions that are held out of the training.

    run_once    an optimizer step on a pack of recent segments, or, after a number of steps, an evaluation
    evaluation  draft chains of the new and of the served weights on the latest held-out segments; if the new ones are
                longer by more than chance, the new weights are converted and offered to the service; otherwise
                training goes on

New weights that are worse by more than chance several times in a row are discarded: training restarts from the served
weights. Each row is used a few times on average, so that training pauses in a service without new texts.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from outrider.checkpoints.disk import write_atomically
from outrider.serving.messages import OnlineStats
from services.draft.learning.algorithms.published import PublishedHead
from services.draft.learning.batches import Batch, PackShape
from services.draft.learning.evaluation import ChainEvaluator
from services.draft.learning.objective import Objective, TargetWeights
from services.draft.learning.optimize import ConstantSchedule, Trainer
from services.draft.model.params import Params
from services.draft.online.options import OnlineOptions
from services.draft.online.replay_buffer import ReplayBuffer
from services.draft.online.sampler import SegmentSampler
from services.draft.online.swap import ServedWeights, WeightHandoff

log = logging.getLogger(__name__)

_MIN_EVALUATION_ROWS = 64
_MAX_WORSE = 3  # evaluations in a row with worse weights before training restarts
_WARMUP_STEPS = 20  # in which the learning rate rises
_DECAY = 0.01


class Learner:
    """The weights in training. Called from one thread, except `load` and `follow`.

    offer: new weights for the service. serving: the weights that serve, float32. worse: evaluations in a row in which
    the new weights were worse. swapping: held while weights are converted, for the present weights of the target.
    """

    def __init__(
        self,
        head: PublishedHead,
        params: Params,
        target: TargetWeights,
        buffer: ReplayBuffer,
        options: OnlineOptions,
        convert: Callable[[Params], ServedWeights],
        keep: Callable[[Params], None] = lambda _: None,
        *,
        logits: tuple[float, float | None] = (1.0, None),
        mixed_precision: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """params: the served weights, float32. convert: converts weights for the service. clock: in seconds.

        keep: called with weights that are served from now on; logits: factor and softcap of the target's logits
        """
        self.offer = WeightHandoff()
        self.convert = convert
        self.worse = 0
        shape = PackShape(1, options.length, options.learnt, options.unroll_steps)
        self.sampler = SegmentSampler(buffer, shape, options.epochs)
        self.objective = Objective(head, options.unroll_steps, options.decay, mixed_precision, *logits)
        self._steps_between = options.steps
        self._keep, self._clock = keep, clock
        self._evaluator = ChainEvaluator(self.objective, target)
        self._copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
        self.serving = params
        schedule = ConstantSchedule(_WARMUP_STEPS, options.rate, 1.0, _DECAY, 1)
        self.trainer = Trainer(self.objective, schedule, target, self._copy(params))
        self._load = OnlineStats()
        self.swapping = threading.Lock()
        self._evaluated = 0  # steps at the last evaluation

    def load(self) -> OnlineStats:
        """Counts of the training; any thread may call."""
        return self._load

    def warm_up(self) -> None:
        """Run every program once, so that nothing is compiled later, and discard the results."""
        batch = self.sampler.empty_batch()
        for _ in range(2):  # the second step's input is the output of a program
            self.trainer.take_step(iter([batch]))
        self._accepted(self.serving, [batch])
        jax.block_until_ready(self.convert(self._copy(self.trainer.state.params)))
        self.trainer.restart(self._copy(self.serving))

    def run_once(self) -> float:
        """Run a step or an evaluation. Returns the seconds that it took, 0 if there was nothing to do."""
        start = self._clock()
        if self._load.steps - self._evaluated >= self._steps_between:
            self.evaluate()
        elif (batch := self.sampler.training_batch(self._load.rows)) is not None:
            self._take_step(batch)
        else:
            return 0.0
        spent = self._clock() - start
        self._load = replace(self._load, seconds=self._load.seconds + spent)
        return spent

    def _take_step(self, batch: Batch) -> None:
        result = self.trainer.take_step(iter([batch]))
        jax.block_until_ready(self.trainer.state.params)  # so that the time is measured
        self._load = replace(
            self._load, steps=self._load.steps + 1, rows=self._load.rows + int((batch.reach > 0).sum())
        )
        if not np.isfinite(result.losses).all():
            log.warning("training diverged (losses %s); it restarts from the served weights", result.losses)
            self.restart()

    def restart(self) -> None:
        """Train from the served weights again."""
        self.trainer.restart(self._copy(self.serving))
        self.worse = 0

    # --- evaluation ---

    def evaluate(self) -> None:
        """Compare the new weights with the served ones, and offer them if they are better."""
        self._evaluated = self._load.steps
        batches = self.sampler.held_out_batches()
        if sum(int((batch.reach > 0).sum()) for batch in batches) < _MIN_EVALUATION_ROWS:
            log.debug("there are too few held-out rows to evaluate %d steps", self._load.steps)
            return
        params = self.trainer.state.params
        old, new = self._accepted(self.serving, batches), self._accepted(params, batches)
        better = is_better(old, new)
        before, after = 1 + float(old.mean()), 1 + float(new.mean())
        log.log(
            logging.INFO if better else logging.DEBUG,
            "%d steps trained: accept length %.3f, was %.3f, on %d held-out rows; %s",
            self._load.steps, after, before, len(old), "kept" if better else "not kept",
        )  # fmt: skip
        if better:
            self._swap(params)
        else:
            self.worse = self.worse + 1 if is_better(new, old) else 0
            if self.worse == _MAX_WORSE:
                self.restart()
        self._load = replace(
            self._load, kept=self._load.kept + better, rejected=self._load.rejected + (not better),
            accept_length_before=before, accept_length_after=after,
        )  # fmt: skip

    def postpone_evaluation(self) -> None:
        """Restart the count of steps to the next evaluation."""
        self._evaluated = self._load.steps

    def _swap(self, params: Params) -> None:
        with self.swapping:
            self.serving, self.worse = self._copy(params), 0
            self.offer.put(jax.block_until_ready(self.convert(self.serving)))
        self._keep(self.serving)

    def follow(self, target: TargetWeights) -> ServedWeights:
        """Train for a target's new weights from the next step on. Returns the served weights, converted anew.

        Called from any thread, which holds `swapping`. Weights that were offered before are dropped with their target's
        """
        self.trainer.follow(target)
        self._evaluator.follow(target)
        self.offer.take()
        served = self.convert(self.serving)
        jax.block_until_ready(served)
        return served

    def _accepted(self, params: Params, batches: list[Batch]) -> NDArray[np.int64]:
        """Accepted tokens of a draft chain behind each row, [n]."""
        found: list[NDArray[np.int64]] = []
        for batch in batches:
            accepted, counts = self._evaluator.accepted(params, batch)
            found.append(accepted[counts])
        return np.concatenate(found)


def is_better(old: NDArray[np.int64], new: NDArray[np.int64]) -> bool:
    """True if the sum rose by more than the standard error of the rows' differences. old, new: [n]."""
    difference = new - old
    return bool(difference.sum() > math.sqrt(float((difference * difference).sum())))


def weight_writer(head: PublishedHead, folder: Path | None, origin: str) -> Callable[[Params], None]:
    """A function that writes weights into a folder, with the fingerprint of the draft that training began with.

    After a failed write, for example on a full disk, the previous files stay, and training goes on.
    """

    def write(params: Params) -> None:
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # First: weights without it would be taken for another draft's.
            write_atomically(folder / ORIGIN, origin + "\n")
            head.publish(jax.tree.map(np.asarray, params), np.zeros(0, np.int64), folder)
        except (OSError, SafetensorError) as error:
            log.warning(
                "the trained weights serve, but could not be written to %s: %s; free some space there, the next "
                "weights are written again", folder, error,
            )  # fmt: skip

    return write


ORIGIN = "origin.txt"
"""Name of the file with the fingerprint of the draft that training began with."""
