"""Settings of verl that reach Outrider."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Options:
    """`actor_rollout_ref.rollout.engine_kwargs.outrider`."""

    addresses: Sequence[str] = ()
    """Gateways that run already, HOST:PORT each, one for each replica. Without any, each replica starts one."""
    command: str = "outrider serve"
    """What starts one; a path, if Outrider is in another environment than verl."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Further flags of the command: names with underscores, and their values."""
    start_seconds: float = 1800.0
    """How long one may take to start."""
    patience: float = 300.0
    """Seconds for which a rollout waits for a gateway that is full, restarts or has no target."""

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Options:
        """From verl's configuration. Raises ValueError for an unknown name."""
        known = [one.name for one in fields(cls)]
        given = dict(given or {})
        if unknown := sorted(given.keys() - set(known)):
            raise ValueError(f"rollout.engine_kwargs.outrider.{unknown[0]} is unknown; there are {', '.join(known)}")
        return cls(**given)

    def address(self, replica_rank: int) -> str | None:
        """Of a replica's gateway; None if the replica starts one. Raises ValueError if there are too few."""
        if not self.addresses:
            return None
        if replica_rank >= len(self.addresses):
            raise ValueError(
                f"rollout.engine_kwargs.outrider.addresses names {len(self.addresses)} gateways, and verl makes a "
                f"replica {replica_rank + 1}: name one for each, or raise rollout.tensor_model_parallel_size, of "
                "which the trainer's devices are a multiple"
            )
        return self.addresses[replica_rank]


@dataclass(frozen=True)
class ReplicaFacts:
    """What a replica's actor reads of verl's configuration.

    tp_size: devices of a replica that starts Outrider. seed: for deterministic rollouts; None lets each draw its own.
    frees_cache: `free_cache_engine`
    """

    model_path: str
    tp_size: int
    dtype: str
    max_model_len: int | None
    prompt_length: int
    response_length: int
    ignore_eos: bool
    seed: int | None
    frees_cache: bool


def all_devices(seen: Iterable[str]) -> str:
    """The devices that several workers see, once each. Numbers are sorted; UUIDs, of MIG's parts too, stay in order."""
    words = dict.fromkeys(word for devices in seen for word in map(str.strip, devices.split(",")) if word)
    return ",".join(sorted(words, key=lambda word: int(word) if word.isdecimal() else -1))
