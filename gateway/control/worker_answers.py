"""What a worker answers to the others, and what all of them are asked together."""

from __future__ import annotations

from functools import partial

from gateway.control.control import Control
from gateway.orchestration.generator import Generator
from gateway.workers.peers import Answers, Peers


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


async def abort_everywhere(generator: Generator, peers: Peers, name: str, *, prefix: bool = False) -> int:
    """End a request, whichever worker has it. prefix: as of Generator.abort. Returns how many answers there were."""
    others = await peers.ask("abort_prefix" if prefix else "abort", name)
    return generator.abort(name, prefix=prefix) + sum(int(count) for count in others.values())
