"""Online training: one step at a time, judged on sessions that are held out of the training.

    run_once    an optimizer step on a pack of segments, or, after a number of steps, an evaluation
    evaluation  the judge compares the new and the served weights; better ones are converted and offered to the service;
                otherwise training goes on
    vocabulary  before the first step behind an evaluation, the head gets entries for tokens that the traffic needs

New weights that are clearly worse several times in a row are discarded: training restarts from the learnt
weights that the served ones were made of. Each row is used a few times on average, so that training pauses in a service
without new texts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from outrider.serving.messages import OnlineStats
from services.draft.learning.algorithms.published import PublishedHead
from services.draft.learning.objective import Objective, TargetWeights
from services.draft.learning.optimize import ConstantSchedule, StepResult, Trainer, TrainState
from services.draft.learning.records.batches import Batch, PackShape
from services.draft.model.params import Params
from services.draft.online import vocabulary
from services.draft.online.judge import Judge, Weights
from services.draft.online.options import OnlineOptions
from services.draft.online.replay_buffer import ReplayBuffer
from services.draft.online.sampler import SegmentSampler
from services.draft.online.swap import LearntWeights, ServedWeights, WeightHandoff

log = logging.getLogger(__name__)

_MAX_WORSE = 3  # evaluations in a row with worse weights before training restarts
_DECAY = 0.01
_SAVE_SECONDS = 300.0  # between two writes of the state


_copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))


@partial(jax.jit, donate_argnums=0)
def _average(old: Params, new: Params, kept: float) -> Params:
    """A mean of old and new parameters. kept: what remains of the old ones."""
    mean: Params = jax.tree.map(lambda a, b: kept * a + (1 - kept) * b, old, new)
    return mean


class Host(Protocol):
    """What the learner needs of the service that it is a part of."""

    def targets(self, *vocabularies: NDArray[np.int64]) -> list[TargetWeights]:
        """The target's present weights for each vocabulary."""

    def convert(self, learnt: LearntWeights, *, served: bool = True) -> ServedWeights:
        """Weights for the service. served: they will be used."""

    def keep(self, learnt: LearntWeights) -> None:
        """Store weights that are served from now on."""

    def save(self, learner: Learner) -> None:
        """Store the state of the training."""

    def frozen_tokens(self) -> set[int] | None:
        """Tokens that keep their entries in the vocabulary; None if the vocabulary is fixed."""


class Learner:
    """The weights in training. Called from one thread, except `load` and `follow`.

    offer: new weights for the service. serving: the weights that serve. averaged: those in training, averaged over the
    latest steps; they are judged, because single steps on small packs are noisy. ids: the vocabulary of both.
    worse: evaluations in a row in which the new weights were worse. swapping: held while weights are converted, for the
    present weights of the target.
    """

    def __init__(
        self, head: PublishedHead, learnt: LearntWeights, host: Host, buffer: ReplayBuffer, options: OnlineOptions, *,
        first: LearntWeights | None = None, logits: tuple[float, float | None] = (1.0, None),
        mixed_precision: bool = True, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """learnt: the served weights. first: the original ones, if others are served.

        clock: in seconds. logits: factor and softcap of the target's logits.
        """
        self.offer = WeightHandoff()
        self.host = host
        self.worse = 0
        self._options, self._clock = options, clock
        shape = PackShape(1, options.length, options.learnt, options.unroll_steps)
        self.sampler = SegmentSampler(buffer, shape, options.epochs)
        objective = Objective(head, options.unroll_steps, options.decay, mixed_precision, *logits)
        self.serving = Weights(learnt, host.targets(learnt.ids)[0])
        self.ids, self.averaged = learnt.ids, _copy(learnt.params)
        origin = self.serving if first is None else Weights(first, host.targets(first.ids)[0])
        self.judge = Judge(objective, self.sampler, origin)
        schedule = ConstantSchedule(options.warmup, options.rate, 1.0, _DECAY, 1)
        self.trainer = Trainer(objective, schedule, self.serving.target, _copy(learnt.params))
        self._load = OnlineStats()
        self.swapping = threading.Lock()
        self._evaluated = 0  # steps at the last evaluation
        self._saved = clock()

    def load(self) -> OnlineStats:
        """Counts of the training; any thread may call."""
        return self._load

    def resume(
        self, load: OnlineStats, state: TrainState | None = None, averaged: Params | None = None,
        ids: NDArray[np.int64] | None = None, step: int = 0,
    ) -> None:  # fmt: skip
        """Go on with an earlier process's counts, weights in training and moments, their vocabulary and steps."""
        self._load, self._evaluated = load, load.steps
        if state is not None and averaged is not None and ids is not None:
            self.ids, (target,) = ids, self.host.targets(ids)
            self.trainer.state, self.trainer.step = state, step
            self.trainer.follow(target)
            self.averaged = averaged

    def warm_up(self) -> None:
        """Run every program once, so that nothing is compiled later, and discard the results."""
        batch, step = self.sampler.empty_batch(), self.trainer.step
        before = jax.tree.map(np.array, (self.trainer.state, self.averaged))
        for _ in range(2):  # the second step's input is the output of a program
            self._optimize(batch)
        self.judge.warm_up()
        jax.block_until_ready(self.host.convert(LearntWeights(_copy(self.averaged), self.ids), served=False))
        self.trainer.state, self.averaged = jax.tree.map(jnp.asarray, before)
        self.trainer.step = step

    def run_once(self) -> float:
        """Run a step or an evaluation. Returns the seconds that it took, 0 if there was nothing to do."""
        start = self._clock()
        if self._load.steps - self._evaluated >= self._options.steps:
            self.evaluate()
        elif (batch := self.sampler.training_batch()) is not None:
            if self._load.steps == self._evaluated:
                self.follow_traffic()
            self._take_step(batch)
        else:
            return 0.0
        if self._clock() - self._saved > _SAVE_SECONDS:
            self.save()
        spent = self._clock() - start
        self._load = replace(self._load, seconds=self._load.seconds + spent)
        return spent

    def save(self) -> None:
        """Store the state of the training, for a later process."""
        self._saved = self._clock()
        self.host.save(self)

    def _take_step(self, batch: Batch) -> None:
        result = self._optimize(batch)
        self._load = replace(
            self._load, steps=self._load.steps + 1, rows=self._load.rows + int((batch.reach > 0).sum())
        )
        if not np.isfinite(result.losses).all():
            log.warning(
                "training diverged (losses %s); it restarts from the last weights that were kept", result.losses
            )
            self.restart()

    def _optimize(self, batch: Batch) -> StepResult:
        """A step of all weights but the known columns of the output layer: those forget most and gain least."""
        result = self.trainer.take_step(iter([batch]))
        params, moments = self.trainer.state
        self.trainer.state = TrainState(self.judge.with_first_output(params, self.ids), moments)
        mean = _average(self.averaged, self.trainer.state.params, self._options.averaging)
        self.averaged = jax.block_until_ready(mean)  # so that the time is measured
        return result

    def restart(self) -> None:
        """Train from the learnt weights again, of which the served ones were made."""
        with self.swapping:
            learnt, target, _ = self.judge.behind(self.serving)
            self.ids = learnt.ids
            self.trainer.follow(target)
            self.train_from(learnt.params)
        self.worse = 0

    def train_from(self, params: Params) -> None:
        """Train from these weights on, without momentum."""
        self.trainer.restart(_copy(params))
        self.averaged = _copy(params)

    def follow_traffic(self) -> None:
        """Give the head in training entries for tokens that it lacks and the traffic needs."""
        frozen = self.host.frozen_tokens()
        if frozen is None:
            return
        buffer = self.sampler.buffer
        stored = {s.number: s.record for s in (*buffer.sample(), *buffer.recent(held_out=False))}
        size = self.trainer.target.draft_ids.shape[0]
        counts = vocabulary.token_counts((r.tokens[max(r.first, 0) :] for r in stored.values()), size)
        if change := vocabulary.exchange(self.ids, counts, frozen):
            with self.swapping:
                self.ids = vocabulary.exchanged_ids(self.ids, change)
                (target,) = self.host.targets(self.ids)
                heads = np.asarray(self.trainer.target.head), np.asarray(target.head)
                averaged = vocabulary.exchanged_state(TrainState(self.averaged, ()), change, *heads)
                self.trainer.state = vocabulary.exchanged_state(self.trainer.state, change, *heads)
                self.averaged = self.judge.with_first_output(averaged.params, self.ids)
                self.trainer.follow(target)
            log.debug("%d entries of the draft's vocabulary are exchanged", len(change.entries))

    # --- evaluation ---

    def evaluate(self) -> None:
        """Compare the new weights with the served ones, and offer them if they are better."""
        self._evaluated = self._load.steps
        new = Weights(LearntWeights(self.averaged, self.ids), self.trainer.target)
        verdict = self.judge.verdict(self.serving, new)
        if verdict is None:
            log.debug("there are too few held-out rows to evaluate %d steps", self._load.steps)
            return
        better = verdict.better
        log.log(logging.INFO if better else logging.DEBUG, "%d steps trained: %s", self._load.steps, verdict.text())
        if better:
            self.swap(verdict.weights)
        else:
            self.worse = self.worse + 1 if verdict.worse else 0
            if self.worse == _MAX_WORSE:
                self.restart()
        self._load = replace(
            self._load, kept=self._load.kept + better, rejected=self._load.rejected + (not better),
            accept_length_before=verdict.before, accept_length_after=verdict.after,
        )  # fmt: skip

    def postpone_evaluation(self) -> None:
        """Restart the count of steps to the next evaluation."""
        self._evaluated = self._load.steps

    def swap(self, weights: Weights) -> None:
        """Serve these weights, of the vocabulary in training, from now on. They are not the arrays in training."""
        with self.swapping:
            if weights.target is not self.trainer.target:  # the target was updated since
                weights = weights._replace(target=self.trainer.target)
            self.serving, self.worse = weights, 0
            self.offer.put(jax.block_until_ready(self.host.convert(weights.learnt)))
        self.host.keep(weights.learnt)
        self.save()  # else a process that ends soon leaves a state that is older than the weights

    def follow(self) -> ServedWeights:
        """Train for the target's new weights from the next step on. Returns the served weights, converted anew.

        Called from any thread, which holds `swapping`. Weights that were offered before are dropped with their target's
        """
        served, first = self.serving.learnt, self.judge.first.learnt
        own, training, origin = self.host.targets(served.ids, self.ids, first.ids)
        self.serving = self.serving._replace(target=own)
        self.judge.follow(Weights(first, origin))
        self.trainer.follow(training)
        self.offer.take()
        converted = self.host.convert(served)
        jax.block_until_ready(converted)
        return converted
