"""Options of online training: flags, their checks, and sizes without a flag."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.config import ONLINE_ALGORITHMS, DraftConfig
from outrider.errors import ConfigError


@dataclass(frozen=True)
class OnlineOptions:
    """share: of the device's time; rate: learning rate; bytes: of recorded hidden states; output: a folder or None.

    versions: updates of the target's weights for which hidden states are used
    length:   rows of a segment
    context:  rows before the trained ones, where a text is longer than a segment
    learnt:   rows of a segment that a step trains on
    unroll_steps: unroll steps
    decay:    fraction of the rows that each further unroll step uses
    steps:    between two evaluations
    epochs:   uses of a row, on average
    held_out: one of this many sessions is held out
    warmup:   steps in which the learning rate rises
    averaging: what the averaged weights keep of themselves at a step
    """

    share: float = 0.2
    rate: float = 2e-4
    bytes: int = 1 << 30
    output: str | None = None
    versions: int = 8
    length: int = 512
    context: int = 128
    learnt: int = 128
    unroll_steps: int = 5
    decay: float = 0.8
    steps: int = 24
    epochs: float = 4.0
    held_out: int = 4
    warmup: int = 20
    averaging: float = 0.95


def options_of(config: DraftConfig) -> OnlineOptions | None:
    """The options that the flags set; None without --online."""
    if not config.online:
        return None
    return OnlineOptions(
        config.online_share, config.online_learning_rate, config.online_bytes, config.online_output,
        config.online_versions,
    )  # fmt: skip


def check_online(config: DraftConfig) -> None:
    """Check the flags of online training. Raises ConfigError with the remedy."""
    if not config.online:
        if config.online_output is not None:
            raise ConfigError("--online-output stores what --online trains; it needs --online")
        return
    algorithm = config.speculative_algorithm
    if algorithm not in ONLINE_ALGORITHMS:
        raise ConfigError(
            f"--online cannot train {algorithm}; leave it out, or draft with one of {', '.join(ONLINE_ALGORITHMS)}, "
            "which `outrider train` creates"
        )
    if config.speculative_draft_model_quantization == "int4":
        raise ConfigError("--online serves trained weights in int8 at least; set another quantization than int4")
    if config.draft_tp_size != 1:
        raise ConfigError("--online trains on a single device; leave out --draft-tp-size")
    if config.draft_feature_dtype == "float8_e4m3":
        raise ConfigError(
            "--online trains on the target's hidden states, for which --draft-feature-dtype float8_e4m3 is too "
            "coarse; set bfloat16"
        )
    if not 0.0 < config.online_share <= 0.9:
        raise ConfigError(f"--online-share must lie above 0 and be at most 0.9, not {config.online_share:g}")
    if not 0.0 < config.online_learning_rate < math.inf:
        raise ConfigError(f"--online-learning-rate must be greater than 0, not {config.online_learning_rate:g}")
    if config.online_versions < 1:
        raise ConfigError(f"--online-versions must be at least 1, not {config.online_versions}")
