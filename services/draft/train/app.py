"""The stages of one training run.

1. Flags are checked, the target's checkpoint is read, and the algorithm defines the draft model.
2. The target generates answers to conversations (data/prompts.py), in a child process or in a running service, and
   streams its hidden states; tokens and states are stored on disk (data/collect.py, ../learning/records/store.py). The
   child process ends when there are enough answers, because it would compete with the training for the cores.
3. The draft vocabulary is the tokens that the target generates most often (../learning/records/vocabulary.py).
4. The draft model is trained (../learning: records/batches.py, unroll.py, objective.py, optimize.py), with checkpoints.
5. The draft model is published into the output folder in the format of its algorithm (../learning/algorithms), with the
   scale of logits that gives the longest accept length (temperature.py).
6. Held-out answers are replayed through the draft engine (evaluate.py), and a report is written (report.py).

An interrupted run resumes: stored answers are not generated again, and training goes on from the last checkpoint.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import uvloop

from outrider.checkpoints import checkpoint
from outrider.config import ProcessConfig, ServiceTlsOptions, TrainConfig, check_minimum, flag_of, parse_flags
from outrider.errors import ConfigError
from outrider.process import process
from services.draft.learning.records.disk import reporting_full_disk
from services.draft.train.data.compact import SUFFIX
from services.draft.train.memory import keep_freed_memory

log = logging.getLogger(__name__)

# Flags whose values may differ when a run resumes.
_FREE_FLAGS = {field.name for options in (ProcessConfig, ServiceTlsOptions) for field in fields(options)} | {
    "output", "answers", "initial", "target", "data", "free_openings", "checkpoint_seconds", "evaluate", "train_device",
    "train_dp_size", "max_running_requests", "max_bytes", "export_answers", "minutes",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Train with command-line flags. Returns the exit code of the process; 2 for invalid flags or files."""
    config = parse_flags(TrainConfig, argv, "outrider train")
    return process.run_plainly("train", config, train)


def train(config: TrainConfig) -> int:
    """Run all stages that are not done yet. Returns 0. Raises OutriderError."""
    check(config)
    keep_freed_memory()
    with reporting_full_disk(f"--output {config.output} or of its answers"):
        _train(config)
    made = "the draft is" if config.export_answers is None else "the answers are"
    print(f"{made} in {Path(config.export_answers or config.output).expanduser()}")  # noqa: T201
    return 0


def _train(config: TrainConfig) -> None:
    # JAX reads its number of threads at import, so it is imported after the process was pinned to its cores.
    from services.draft.learning.optimize import CHECKPOINT, saved_facts
    from services.draft.train.data.compact import write_compact
    from services.draft.train.data.writing import open_store, write_answers
    from services.draft.train.run import TrainingRun

    output = Path(config.output).expanduser()
    # A model beside a checkpoint belongs to a run that was interrupted during its evaluation.
    if (output / "model.safetensors").exists() and not (output / "checkpoint" / CHECKPOINT).exists():
        raise ConfigError(f"--output {output} holds a model already; name another folder")
    output.mkdir(parents=True, exist_ok=True)
    target = checkpoint.resolve(config.model_path)
    training = TrainingRun(config, target)
    store = open_store(config, target, training.algorithm.states)
    saved = saved_facts(output / "checkpoint")
    if saved is not None and len(store) < saved["records"]:  # before the target writes others
        raise ConfigError(
            f"the checkpoint in {output} learnt from {saved['records']} answers, and {store.folder} holds "
            f"{len(store)}; copy all of them there, or remove the checkpoint to start again"
        )
    uvloop.run(write_answers(config, store, training.algorithm.states, checkpoint.fingerprint(target)))
    if config.export_answers is not None:
        store.close()
        write_compact(store.read(), Path(config.export_answers).expanduser())
        return
    store.close()  # other training runs may write to it while this one trains
    began = time.monotonic()
    training.run(store, output / "checkpoint", settings(config))
    training.publish(output)
    training.report(output, settings(config), time.monotonic() - began)
    shutil.rmtree(output / "checkpoint", ignore_errors=True)


def settings(config: TrainConfig) -> dict[str, Any]:
    """The flags that decide the trained draft, as JSON values."""
    return {name: value for name, value in asdict(config).items() if name not in _FREE_FLAGS}


def check(config: TrainConfig) -> None:
    """Check that the flags fit together. Raises ConfigError with the offending flag."""
    positive = (
        "tokens", "max_new_tokens", "max_length", "max_running_requests", "batch_tokens", "unroll", "draft_vocab_size",
        "max_bytes",
    )  # fmt: skip
    check_minimum(config, dict.fromkeys(positive, 1))
    optional = ("data_limit", "steps", "intermediate_size", "num_layers", "hidden_size", "train_dp_size")
    check_minimum(config, dict.fromkeys(optional, 1))
    check_minimum(config, dict.fromkeys(("free_prompts", "seed", "evaluate"), 0))
    for name, low, high in (("warmup", 0.0, 1.0), ("held_out", 0.0, 0.5), ("unroll_decay", 0.0, 1.0)):
        value = getattr(config, name)
        if not low <= value <= high:
            raise ConfigError(f"{flag_of(name)} must lie between {low:g} and {high:g}, not {value:g}")
    if config.minutes is not None and not config.minutes > 0:
        raise ConfigError("--minutes must be greater than 0")
    if config.export_answers is not None and not config.export_answers.endswith(SUFFIX):
        raise ConfigError(f"--export-answers {config.export_answers} must end in {SUFFIX}")
    if not config.epochs > 0 or not config.learning_rate > 0:
        raise ConfigError("--epochs and --learning-rate must be greater than 0")
    if not config.temperature or not all(0 <= value <= 100 and math.isfinite(value) for value in config.temperature):
        raise ConfigError("--temperature needs one or more numbers between 0 and 100")
    if config.max_new_tokens >= config.max_length:
        raise ConfigError(
            f"--max-length {config.max_length} counts prompt and answer; it must be greater than "
            f"--max-new-tokens {config.max_new_tokens}"
        )
