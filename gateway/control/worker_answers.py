"""Requests between workers: the answers of a worker, and aborts in all workers."""

from __future__ import annotations

from functools import partial

from gateway.control.control import Control
from gateway.orchestration.generator import Generator
from gateway.workers.peers import Answers, Peers


def answers_for(generator: Generator, control: Control) -> Answers:
    """Handlers by request: metrics of this worker, aborts, new weights, pauses."""
    return {
        "metrics": lambda _: generator.metrics.render().decode(),
        "abort": generator.abort,
        "abort_prefix": partial(generator.abort, prefix=True),
        "abort_all": lambda _: generator.abort_all(),
        "weights": control.adopt_weights,
        "targets_up": lambda _: control.targets_up(),
        "pause": control.adopt_pause,
    }


async def abort_everywhere(generator: Generator, peers: Peers, name: str, *, prefix: bool = False) -> int:
    """Abort a request in any worker. prefix: as in Generator.abort. Returns the number of generations."""
    others = await peers.ask("abort_prefix" if prefix else "abort", name)
    return generator.abort(name, prefix=prefix) + sum(int(count) for count in others.values())
