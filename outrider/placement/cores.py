"""CPU cores of each process.

Spinning thread pools slow one another down on shared cores, so each process has cores of its own if there are enough.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.config import FED_ALGORITHMS, MODEL_ALGORITHMS, ServeConfig, parse_cores
from outrider.errors import ConfigError
from outrider.placement.devices import has_gpu

_NICENESS = 15  # of a draft service on a core of the target: a thirtieth of the core while both compute


@dataclass(frozen=True)
class CorePlan:
    """Core numbers of each process. They overlap only on machines with fewer than four cores.

    niceness: scheduling niceness of the draft service. shared: further cores for its network threads.
    """

    target: tuple[int, ...]
    draft: tuple[int, ...]
    gateway: tuple[int, ...]
    niceness: int = 0
    shared: tuple[int, ...] = ()

    @property
    def together(self) -> bool:
        """True if target and draft service share a core."""
        return not set(self.target).isdisjoint(self.draft)

    @property
    def network(self) -> tuple[int, ...]:
        """Cores of the draft service's network threads."""
        return tuple(sorted({*self.draft, *self.shared}))


def share_cores(cores: Sequence[int], replicas: int) -> list[tuple[int, ...]]:
    """The cores of each replica of a service: neighbouring ones that no other replica has, if there are enough.

    Numbers of cores differ by one at most. Where there are more replicas than cores, some have the same core.
    """
    count = len(cores)
    if count < replicas:
        return (
            [tuple(cores[number % count : number % count + 1]) for number in range(replicas)]
            if count
            else [()] * replicas
        )
    ends = [count * number // replicas for number in range(replicas + 1)]
    return [tuple(cores[first:end]) for first, end in pairwise(ends)]


def plan_cores(cores: Sequence[int], algorithm: str, workers: int = 1, drafts: int = 1) -> CorePlan:
    """Divide cores among the processes. The replicas of a service divide its cores (`share_cores`). drafts: replicas.

    Four cores or more: the gateway has one a worker, at most a quarter; drafters without a model have one each, at most
    a quarter, draft models a quarter; the target has the rest. Three cores: the target has two; draft service and
    gateway share the third. Two cores: the target has both (measured: 150 tokens/s, against 110 tokens/s on one core);
    a draft head computes on the second one while the target does not, and its network threads use both, so that
    proposals do not wait for the end of its computation. A draft model of its own computes on both while the target
    waits for it. One core: all share it.
    """
    cores = tuple(cores)
    count = len(cores)
    if count >= 4:
        drafts = 0 if algorithm == "NONE" else drafts
        draft = count // 4 if algorithm in MODEL_ALGORITHMS else min(drafts, count // 4)
        gateway = min(workers, count // 4)
        target = count - gateway - draft
        return CorePlan(cores[:target], cores[target : target + draft], cores[-gateway:])
    if count == 2 and algorithm in FED_ALGORITHMS and drafts == 1:
        return CorePlan(cores, cores[-1:], cores, _NICENESS, shared=cores)
    if count == 2:
        return CorePlan(cores, cores, cores, _NICENESS)
    return CorePlan(cores[: max(1, count - 1)], cores[-1:], cores[-1:])


def choose_cores(config: ServeConfig) -> CorePlan:
    """The plan for this machine and the user's flags. Raises ConfigError for cores that the process may not use."""
    usable = sorted(os.sched_getaffinity(0))
    cores = _checked(config.cores, usable) or usable
    plan = plan_cores(cores, config.draft.speculative_algorithm, config.gateway.gateway_workers, config.draft_replicas)
    target = _checked(config.cores_target, usable) or plan.target
    draft = _checked(config.cores_draft, usable) or plan.draft
    gateway = _checked(config.cores_gateway, usable) or plan.gateway
    overlap = set(target) & set(draft)
    # With --cores-draft the network threads stay on those cores, too.
    shared = plan.shared if overlap and config.cores_draft is None else ()
    return CorePlan(target, draft, gateway, plan.niceness if overlap else 0, shared)


def draft_has_own_place(cores: CorePlan, *, target_device: str = "auto", draft_device: str = "auto") -> bool:
    """True if the draft service computes on a device or on cores that the target does not use.

    A target on a GPU leaves the CPU cores to the draft service.
    """
    target_on_cpu = target_device == "cpu" or (target_device == "auto" and not has_gpu())
    return not (cores.together and target_on_cpu and draft_device in ("auto", "cpu"))


def _checked(text: str | None, usable: Sequence[int]) -> tuple[int, ...]:
    cores = parse_cores(text) if text is not None else []
    if absent := [core for core in cores if core not in usable]:
        raise ConfigError(f"core {absent[0]} cannot be used; this process may use {', '.join(map(str, usable))}")
    return tuple(cores)
