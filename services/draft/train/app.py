"""The life of a training.

1. Flags are checked, the target's checkpoint is read, and the algorithm says what the head will look like.
2. The target writes answers to conversations (data/prompts.py), in a process of its own or one that runs already, and
   streams its states; both are kept on disk (data/collect.py, ../learning/store.py). Once there is enough, the process
   ends: it and training would compete for the cores.
3. The head's vocabulary are the tokens that the target wrote most often (../learning/vocabulary.py).
4. The head learns (../learning: batches.py, unroll.py, objective.py, optimize.py), with checkpoints.
5. The draft is published into the output folder in the format of its algorithm (algorithms/), as sharp as suits it
   (temperature.py).
6. Held-out answers are replayed through the draft service's engine (evaluate.py), and a report is left (report.py).

A run that was ended goes on where it was: no answer is written twice, and steps go on from the last checkpoint.
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
from outrider.config import ProcessConfig, ServiceTlsOptions, TrainConfig, parse_flags
from outrider.errors import ConfigError
from outrider.process import process
from services.draft.learning.disk import told_when_full
from services.draft.train.memory import keep_freed_memory

log = logging.getLogger(__name__)

# Flags that may be other ones when a run goes on.
_FREE_FLAGS = {field.name for options in (ProcessConfig, ServiceTlsOptions) for field in fields(options)} | {
    "output", "answers", "initial", "target", "data", "free_openings", "checkpoint_seconds", "evaluate", "train_device",
    "max_running_requests", "max_bytes",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Train with flags. Returns the process's exit code; 2 for flags or files that do not fit."""
    config = parse_flags(TrainConfig, argv, "outrider train")
    return process.run_plainly("train", config, train)


def train(config: TrainConfig) -> int:
    """Train from what is there already to the end. Returns 0. Raises OutriderError."""
    check(config)
    keep_freed_memory()
    with told_when_full(f"--output {config.output} or of its answers"):
        _train(config)
    print(f"the draft is in {Path(config.output).expanduser()}")  # noqa: T201
    return 0


def _train(config: TrainConfig) -> None:
    # JAX reads the number of its threads when it is imported, which is after the process has been put on its cores.
    from services.draft.learning.optimize import CHECKPOINT
    from services.draft.train.data.writing import open_store, write_answers
    from services.draft.train.run import Learning

    output = Path(config.output).expanduser()
    # With a checkpoint beside it, it is that of a run that was ended while it looked at what it had learnt.
    if (output / "model.safetensors").exists() and not (output / "checkpoint" / CHECKPOINT).exists():
        raise ConfigError(f"--output {output} holds a model already; name another folder")
    output.mkdir(parents=True, exist_ok=True)
    target = checkpoint.resolve(config.model_path)
    learning = Learning(config, target)
    store = open_store(config, target, learning.algorithm.states)
    uvloop.run(write_answers(config, store, learning.algorithm.states, checkpoint.fingerprint(target)))
    store.close()  # other trainings may share it while this one learns
    began = time.monotonic()
    learning.run(store, output / "checkpoint", settings(config))
    learning.publish(output)
    learning.report(output, settings(config), time.monotonic() - began)
    shutil.rmtree(output / "checkpoint", ignore_errors=True)


def settings(config: TrainConfig) -> dict[str, Any]:
    """The flags that decide what comes out, as JSON has them."""
    return {name: value for name, value in asdict(config).items() if name not in _FREE_FLAGS}


def check(config: TrainConfig) -> None:
    """Refuse flags that do not fit. Raises ConfigError saying which."""
    for name in (
        "tokens", "max_new_tokens", "max_length", "max_running_requests", "batch_tokens", "unroll", "draft_vocab_size",
        "max_bytes",
    ):  # fmt: skip
        _at_least(config, name, 1)
    for name in ("data_limit", "steps", "intermediate_size", "num_layers", "hidden_size"):
        if getattr(config, name) is not None:
            _at_least(config, name, 1)
    for name in ("free_prompts", "seed", "evaluate"):
        if getattr(config, name) is not None:
            _at_least(config, name, 0)
    for name, low, high in (("warmup", 0.0, 1.0), ("held_out", 0.0, 0.5), ("unroll_decay", 0.0, 1.0)):
        value = getattr(config, name)
        if not low <= value <= high:
            raise ConfigError(f"{_flag(name)} must lie between {low:g} and {high:g}, not {value:g}")
    if not config.epochs > 0 or not config.learning_rate > 0:
        raise ConfigError("--epochs and --learning-rate must be greater than 0")
    if not config.temperature or not all(0 <= value <= 100 and math.isfinite(value) for value in config.temperature):
        raise ConfigError("--temperature needs one or more numbers between 0 and 100")
    if config.max_new_tokens >= config.max_length:
        raise ConfigError(
            f"--max-length {config.max_length} is for prompt and answer; it must be greater than "
            f"--max-new-tokens {config.max_new_tokens}"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _at_least(config: TrainConfig, name: str, least: int) -> None:
    value = getattr(config, name)
    if value < least:
        raise ConfigError(f"{_flag(name)} must be {least} or more, not {value}")
