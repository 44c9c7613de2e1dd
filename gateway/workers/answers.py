"""What a worker answers to the others."""

from __future__ import annotations

from functools import partial

from gateway.control import Control
from gateway.generator import Generator
from gateway.workers.peers import Answers


def answers_for(generator: Generator, control: Control) -> Answers:
    """By question: its own metrics; what another worker was told: to end requests, new weights, to pause or go on."""
    return {
        "metrics": lambda _: generator.metrics.render().decode(),
        "abort": generator.abort,
        "abort_prefix": partial(generator.abort, prefix=True),
        "abort_all": lambda _: generator.abort_all(),
        "weights": control.adopt,
        "pause": control.adopt_pause,
    }
