"""Requests between workers about one model: the answers of a worker, and aborts in all workers."""

from __future__ import annotations

from gateway.admission.caller import CALLER
from gateway.control.control import Control
from gateway.orchestration.generator import Generator
from gateway.workers.peers import Answers, Peers


def answers_for(generator: Generator, control: Control) -> Answers:
    """Handlers by request: aborts, new weights, pauses and open updates of one model."""
    return {
        "abort": lambda asked: generator.abort(*asked),
        "abort_all": lambda _: generator.abort_all(),
        "weights": control.weights.adopt,
        "targets_up": lambda _: control.weights.targets_up(),
        "pause": control.adopt_pause,
        "update": control.adopt_update,
        "running": lambda _: generator.running,
    }


async def abort_everywhere(generator: Generator, peers: Peers, name: str) -> int:
    """Abort a request of CALLER in any worker, as in Generator.abort. Returns the number of generations."""
    owner = CALLER.get().owner
    others = await peers.ask("abort", [name, owner])
    return generator.abort(name, owner) + sum(int(count) for count in others.values())
