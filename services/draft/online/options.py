"""How learning while serving is told: flags, what of them cannot work, and sizes that nobody need choose."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.config import ONLINE_ALGORITHMS, DraftConfig
from outrider.errors import ConfigError


@dataclass(frozen=True)
class OnlineOptions:
    """share: of the device's time; rate: of learning; bytes: of kept hidden states; output: a folder, None for none.

    length:   rows of a piece of text that is learnt in one go
    context:  rows before it that go along where a text is longer
    learnt:   rows of a piece that a step learns from
    ahead:    tokens that are foretold from each
    decay:    part of the rows that look at each further token
    steps:    between two looks at the held-back sessions
    epochs:   times that a row is learnt from, on average
    held_out: one session of so many is held back
    """

    share: float = 0.2
    rate: float = 1e-4
    bytes: int = 1 << 30
    output: str | None = None
    length: int = 512
    context: int = 128
    learnt: int = 128
    ahead: int = 5
    decay: float = 0.8
    steps: int = 32
    epochs: float = 4.0
    held_out: int = 8


def options_of(config: DraftConfig) -> OnlineOptions | None:
    """What the flags say; None if nothing is to be learnt."""
    if not config.online:
        return None
    return OnlineOptions(config.online_share, config.online_learning_rate, config.online_bytes, config.online_output)


def check_online(config: DraftConfig) -> None:
    """Refuse flags that do not fit. Raises ConfigError saying what to do."""
    if not config.online:
        if config.online_output is not None:
            raise ConfigError("--online-output keeps what is learnt while serving; it needs --online")
        return
    algorithm = config.speculative_algorithm
    if algorithm not in ONLINE_ALGORITHMS:
        raise ConfigError(
            f"--online cannot teach {algorithm}; leave it out, or draft with one of {', '.join(ONLINE_ALGORITHMS)}, "
            "of which `outrider train` makes a first one"
        )
    if config.draft_tp_size != 1:
        raise ConfigError("--online learns on a single device; leave out --draft-tp-size")
    if config.draft_feature_dtype == "float8_e4m3":
        raise ConfigError(
            "--online learns from the target's hidden states, for which --draft-feature-dtype float8_e4m3 is too "
            "coarse; say bfloat16"
        )
    if not 0.0 < config.online_share <= 0.9:
        raise ConfigError(f"--online-share must lie above 0 and be at most 0.9, not {config.online_share:g}")
    if not 0.0 < config.online_learning_rate < math.inf:
        raise ConfigError(f"--online-learning-rate must be greater than 0, not {config.online_learning_rate:g}")
