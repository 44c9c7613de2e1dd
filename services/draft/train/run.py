"""The stage of a training run in which the draft model is trained, published and evaluated."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints import checkpoint
from outrider.config import TrainConfig
from outrider.errors import ConfigError, EngineFault
from outrider.serving.features import FeatureFormat, decode
from outrider.speculation.shape import TreeShape
from services.draft.formats.target import read_target, target_logits
from services.draft.learning.algorithms import Algorithm, DraftShape, algorithm_of
from services.draft.learning.algorithms.initial import initial_head
from services.draft.learning.data_parallel import DataParallel
from services.draft.learning.evaluation import ChainEvaluator
from services.draft.learning.objective import Objective, TargetWeights
from services.draft.learning.optimize import Schedule, StepResult, Trainer, saved_facts
from services.draft.learning.pace import fitted
from services.draft.learning.records.ahead import AheadOfTime
from services.draft.learning.records.batches import Batch, Batches, learnt_rows
from services.draft.learning.records.resident import resident_states
from services.draft.learning.records.store import Reader, Record, Store
from services.draft.learning.records.vocabulary import check_count, coverage, draft_ids, frequent_tokens
from services.draft.model.parallel.devices import choose_devices, devices_named
from services.draft.model.params import Params
from services.draft.train import report
from services.draft.train.evaluate import replay, shapes_for
from services.draft.train.progress import Bar
from services.draft.train.report import Curve
from services.draft.train.temperature import best_factor

log = logging.getLogger(__name__)

_BATCH_ROWS = 2048  # trained rows of a batch, about: bounds the memory
_SCALE_RECORDS = 64
_EVALUATION_BATCHES = 4  # held-out batches of an evaluation during training
_EVALUATIONS = 20  # over the whole run
_POINTS = 400  # of the curve


class TrainingRun:
    """One training run. Call `run`, then `publish`, then `report`."""

    def __init__(self, config: TrainConfig, target: Path) -> None:
        """target: folder of its checkpoint. Raises ConfigError for flags that do not fit it."""
        self.config, self.target = config, read_target(target)
        self._parallel = _shared_devices(config)
        self._device = config.train_device.partition(",")[0]  # of the evaluation
        self.algorithm = self._algorithm()
        if self.algorithm.vocabulary() is None and not self.algorithm.whole_vocabulary:
            check_count(config.draft_vocab_size, self.target.vocab_size)  # before any answer is generated
        self._uses_features = self.algorithm.model.head.uses_features
        self._unroll_steps = self.algorithm.depth or config.unroll
        self.curve = Curve()
        self._ids = np.zeros(0, np.int64)
        self.facts: dict[str, Any] = {}

    def _algorithm(self) -> Algorithm:
        config = self.config
        if config.initial is not None:
            return initial_head(config.algorithm, checkpoint.resolve(config.initial, torch_files=True), self.target)
        shape = DraftShape(
            config.num_layers, config.hidden_size, config.intermediate_size, config.draft_vocab_size,
            config.aux_layers, config.block_size,
        )  # fmt: skip
        return algorithm_of(config.algorithm, self.target, shape)

    def _origin(self) -> str | None:
        """Fingerprint of the draft that --initial names; None without one."""
        initial = self.config.initial
        return None if initial is None else checkpoint.fingerprint(checkpoint.resolve(initial, torch_files=True))

    # --- training ---

    def run(self, store: Store, folder: Path, settings: dict[str, Any]) -> None:
        """Train from the last checkpoint to the end. folder: of checkpoints. Raises ConfigError."""
        saved = saved_facts(folder)
        # Other runs may have added answers since this one began.
        reader = store.read(None if saved is None else saved["records"])
        self.reader, self._held_out = reader, reader.choose(held_out=True)
        learnt = reader.choose(held_out=False)
        self._choose_vocabulary(reader, learnt)
        objective = self._objective()
        rows = min(_BATCH_ROWS, self.config.batch_tokens)
        batches = Batches(reader, learnt, rows, self._unroll_steps, self.config.seed, self._uses_features)
        schedule = self._schedule(batches)
        params = self.algorithm.first_params(self.target, self._ids, self._scales(reader, learnt), self.config.seed)
        weights = self.target_weights()
        trainer = Trainer(objective, schedule, weights, params, self._parallel)
        evaluation = _HeldOutEvaluation(ChainEvaluator(objective, weights), self._evaluation_batches(reader))
        batches.resident = resident_states(reader, learnt)
        if self.config.minutes is not None:
            schedule = self._fitted(trainer, schedule, batches, evaluation, saved)
        target = checkpoint.fingerprint(self.target.folder)
        facts = {"settings": settings, "target": target, "records": len(reader), "steps": schedule.steps}
        self._resume(trainer, folder, facts)
        log.info(
            "%d answers, %d trained tokens; batches of %s; %d steps of %d batches, %.1f M parameters",
            len(learnt), batches.learnt,
            " or ".join(f"{shape.packs} x {shape.learnt} rows in {shape.length} places" for shape, _ in batches.shapes),
            schedule.steps, schedule.batches, sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6,
        )  # fmt: skip
        self._take_steps(trainer, schedule, batches, evaluation, folder, facts)
        self._params = trainer.state.params
        self.facts |= {"learnt_tokens": batches.learnt, "answers": len(learnt), "steps": schedule.steps}

    def _choose_vocabulary(self, reader: Reader, learnt: list[int]) -> None:
        texts = list(reader.learnt(learnt))
        vocab = self.target.vocab_size
        count = vocab if self.algorithm.whole_vocabulary else self.config.draft_vocab_size
        settled = self.algorithm.vocabulary()
        self._ids = frequent_tokens(texts, vocab, count) if settled is None else settled
        inside = coverage(reader.learnt(self._held_out or learnt), self._ids, vocab)
        self.facts["vocabulary_coverage"] = inside
        log.info("the draft's vocabulary of %d tokens covers %.2f %% of held-out answers", len(self._ids), 100 * inside)

    def _objective(self) -> Objective:
        config = self.config
        mixed_precision = config.train_dtype != "float32"
        return Objective(
            self.algorithm, self._unroll_steps, config.unroll_decay, mixed_precision, *target_logits(self.target)
        )

    def _schedule(self, batches: Batches) -> Schedule:
        config = self.config
        rows = batches.learnt / batches.epoch
        together = max(1, round(config.batch_tokens / rows))
        steps = config.steps or max(1, round(config.epochs * batches.epoch / together))
        return Schedule(steps, config.learning_rate, config.warmup, config.weight_decay, together)

    def _fitted(
        self, trainer: Trainer, schedule: Schedule, batches: Batches, evaluation: _HeldOutEvaluation,
        saved: dict[str, Any] | None,
    ) -> Schedule:  # fmt: skip
        """The schedule within --minutes; that of the checkpoint, if there is one."""
        if saved is not None:
            schedule = replace(schedule, steps=saved["steps"])
            trainer.begin(trainer.state.params, schedule)
            return schedule
        assert self.config.minutes is not None
        return fitted(trainer, schedule, batches, 60 * self.config.minutes, _EVALUATIONS, evaluation)

    def _scales(self, reader: Reader, learnt: list[int]) -> NDArray[np.float32]:
        """Root mean square of each state of the target. The first token's are often far larger."""
        sample = np.random.default_rng(self.config.seed).permutation(learnt)[:_SCALE_RECORDS]
        rows = [decode(reader.rows(int(i))[1:], FeatureFormat.BFLOAT16) for i in sample]
        states = np.concatenate(rows).reshape(-1, len(self.algorithm.states.layers) + 1, self.target.hidden_size)
        scales: NDArray[np.float32] = np.sqrt((states.astype(np.float64) ** 2).mean(axis=(0, 2))).astype(np.float32)
        return scales

    def target_weights(self) -> TargetWeights:
        """The frozen weights of the target. Called after the vocabulary was chosen."""
        tensors = self.target.embedding_and_head(lambda array: array)
        head = np.asarray(tensors["head"])
        own = self.algorithm.embedding()
        embed = np.asarray(tensors.get("embed", head.T) if own is None else own)
        dtype = jnp.float32 if self.config.train_dtype == "float32" else jnp.bfloat16
        return TargetWeights(
            jnp.asarray(embed.astype(np.float32), dtype),
            jnp.asarray(head[:, self._ids].astype(np.float32), dtype),
            jnp.asarray(draft_ids(self._ids, self.target.vocab_size)),
        )

    def _resume(self, trainer: Trainer, folder: Path, facts: dict[str, Any]) -> None:
        saved = trainer.load(folder)
        if saved is None:
            return
        # The target's fingerprint stands for its path, which is another one on another machine.
        settings = {name: value for name, value in facts["settings"].items() if name != "model_path"}
        wrong = [name for name, value in settings.items() if saved["settings"].get(name) != _json(value)]
        wrong += [name for name in ("target", "records", "steps") if saved.get(name) != facts[name]]
        if wrong:
            raise ConfigError(
                f"the checkpoint in {folder} is of a run with other {', '.join(wrong)}; remove it to start again, "
                "or name another --output"
            )
        self.curve = Curve(**saved["curve"])
        log.info("resuming after step %d", trainer.step)

    def _evaluation_batches(self, reader: Reader) -> list[Batch]:
        """Held-out batches that are evaluated during training."""
        if not learnt_rows(reader.entries[self._held_out])[1].any():
            return []
        batches = Batches(reader, self._held_out, _BATCH_ROWS, self._unroll_steps, 0, self._uses_features)
        return list(itertools.islice(batches.since(0), min(_EVALUATION_BATCHES, batches.epoch)))

    def _take_steps(
        self,
        trainer: Trainer,
        schedule: Schedule,
        batches: Batches,
        evaluation: _HeldOutEvaluation,
        folder: Path,
        facts: dict[str, Any],
    ) -> None:
        every, between = max(1, schedule.steps // _EVALUATIONS), max(1, schedule.steps // _POINTS)
        saved = began = time.monotonic()
        rows = 0
        if trainer.step == 0:
            self.curve.seen.append((0, *evaluation(trainer.state.params)))
        with (
            AheadOfTime(batches.since(trainer.batches_taken)) as stream,
            Bar("training, in steps", schedule.steps, trainer.step) as bar,
        ):
            last: StepResult | None = None
            while trainer.step < schedule.steps:
                result = trainer.take_step(stream)
                if last is not None:
                    rows += self._note(trainer.step - 1, last, between)
                last = result
                if trainer.step % every == 0 or trainer.step == schedule.steps:
                    self.curve.seen.append((trainer.step, *evaluation(trainer.state.params)))
                self._show(bar, trainer.step, rows / (time.monotonic() - began))
                if time.monotonic() - saved > self.config.checkpoint_seconds:
                    rows, last = rows + self._note(trainer.step, last, between), None
                    trainer.save(folder, facts | {"curve": asdict(self.curve)})
                    saved = time.monotonic()
            if last is not None:
                self._note(trainer.step, last, between)
        seconds = time.monotonic() - began
        self.facts |= {"step_seconds": round(seconds, 1), "waited_for_batches": round(stream.waited, 1)}
        trainer.save(folder, facts | {"curve": asdict(self.curve)})

    def _note(self, step: int, result: StepResult, between: int) -> int:
        """Add a step to the curve every `between` steps. Returns its trained rows. Raises EngineFault."""
        losses = result.losses
        if not np.isfinite(losses).all():
            raise EngineFault(
                f"training diverged in step {step} (losses {losses}); choose a lower "
                "--learning-rate, with another --output and the same --answers"
            )
        if step % between == 0:
            self.curve.steps.append(step)
            self.curve.losses.append([round(float(loss), 4) for loss in losses])
        return result.rows

    def _show(self, bar: Bar, step: int, speed: float) -> None:
        seen = self.curve.seen[-1] if self.curve.seen else (0, 0.0, 0.0)
        losses = " ".join(f"{loss:.2f}" for loss in self.curve.losses[-1]) if self.curve.losses else "-"
        bar.at(step, f"{speed:.0f} tokens/s, loss {losses}, chains {seen[1]:.2f} {seen[2]:.2f}")

    # --- results ---

    def publish(self, folder: Path) -> None:
        """Write the draft with the scale of logits that gives the longest accept length."""
        params = jax.tree.map(np.asarray, self._params)

        def write(factor: float, where: Path) -> None:
            sharpened = self.algorithm.sharpened(params, factor)
            self.algorithm.publish(params if sharpened is None else sharpened, self._ids, where)

        factor, count = 1.0, self.config.evaluate
        records = self._records(self._held_out[count : 2 * count] or self._held_out[:count])
        if records and self.algorithm.sharpened(params, factor) is not None:
            factor, gains = best_factor(
                self.config.algorithm,
                write,
                self.target.folder,
                records,
                self._shapes()["tree"],
                self._device,
            )
            self.facts["sharpness"] = {"factor": factor, "gains": gains}
        write(factor, folder)

    def report(self, folder: Path, settings: dict[str, Any], seconds: float) -> None:
        """Replay held-out answers, and write the report."""
        records = self._records(self._held_out[: self.config.evaluate])
        evaluation: dict[str, Any] = {}
        for name, shape in self._shapes().items() if records else ():
            scores = replay(self.config.algorithm, folder, self.target.folder, records, shape, self._device)
            evaluation[name] = {"shape": asdict(shape)} | {f"temperature {t:g}": s.facts() for t, s in scores.items()}
            for temperature, score in sorted(scores.items()):
                log.info(
                    "%s of %d steps, %d tokens, temperature %g: accept length %.2f",
                    name, shape.steps, shape.rows, temperature, score.accept_length,
                )  # fmt: skip
        facts = self.facts | {
            "target": checkpoint.fingerprint(self.target.folder), "initial": self._origin(),
            "seconds": round(seconds, 1), "evaluation": evaluation,
        }  # fmt: skip
        report.write(folder, settings, facts, self.curve)

    def _shapes(self) -> dict[str, TreeShape]:
        """The trees of the evaluation, by name; those of a block drafter are as deep as its block."""
        return shapes_for(self.algorithm.depth if self._uses_features else None)

    def _records(self, indices: list[int]) -> list[Record]:
        return [self.reader.record(i) for i in indices]


def _shared_devices(config: TrainConfig) -> DataParallel | None:
    """The devices that share the training; None for one. Raises ConfigError."""
    count = config.train_dp_size or devices_named(config.train_device)
    devices = choose_devices(config.train_device, count, "--train-device", count_flag="--train-dp-size")
    return DataParallel(devices) if len(devices) > 1 else None


class _HeldOutEvaluation:
    """Accept length of draft chains on held-out rows, greedy and sampled; 0 where there are no such rows."""

    def __init__(self, evaluator: ChainEvaluator, batches: list[Batch]) -> None:
        self._evaluator, self._batches = evaluator, batches

    def __call__(self, params: Params) -> tuple[float, float]:
        sums = np.zeros((2, 2))  # accepted tokens and rows, greedy and sampled
        for batch in self._batches:
            accepted, counts = self._evaluator.accepted(params, batch)
            sampled = batch.sampled[:, : counts.shape[1]]
            for i, kind in enumerate((~sampled, sampled)):
                sums[i] += (accepted[counts & kind].sum(), (counts & kind).sum())
        lengths = [round(float(1 + a / n), 4) if n else 0.0 for a, n in sums]
        return lengths[0], lengths[1]


def _json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
