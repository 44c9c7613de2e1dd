"""`--cores auto`: the share of the machine that `outrider serve` would give a process started without it.

Three containers on one machine start independently. Each computes the plan of `outrider serve` for all three and takes
its own part: cores, and, for a draft service on the target's cores, the drafter for AUTO and the tree shape. Target and
gateway do not know the drafter and assume a draft model.

With --machine-replicas several containers of a service divide its part, and the GPUs that they see: each takes a number
that no other one has (claims.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.config import (
    AUTO_CORES,
    MODEL_ALGORITHMS,
    DraftConfig,
    GatewayConfig,
    TargetConfig,
    check_minimum,
    format_cores,
)
from outrider.drafts import resolve_drafter
from outrider.placement.claims import claim_number
from outrider.placement.cores import CorePlan, draft_has_own_place, plan_cores, share_cores
from outrider.placement.devices import gpus, has_gpu
from outrider.placement.memory import CPU_FRACTION
from outrider.placement.replicas import Role, devices_of_replicas
from outrider.placement.tree_shapes import draft_ahead, draft_niceness, draft_tree

log = logging.getLogger(__name__)


def _plan(algorithm: str = "EAGLE3", workers: int = 1, drafts: int = 1) -> CorePlan:
    return plan_cores(sorted(os.sched_getaffinity(0)), algorithm, workers, drafts)


def share_of_target(config: TargetConfig) -> TargetConfig:
    """The target's flags, with "auto" replaced by its cores, and devices and memory of one of several replicas.

    Raises ConfigError where replicas and devices do not fit.
    """
    if config.cores != AUTO_CORES:
        return config
    replicas, number = _number("target", config)
    own: dict[str, Any] = {"cores": format_cores(_own_cores("target", _plan().target, replicas, number))}
    if replicas > 1:
        ranks = config.tp_size // max(1, config.nnodes)
        own["device"] = device = _own_device("target", config.device, replicas, number, ranks)
        if device in ("auto", "cpu") and config.mem_fraction_static is None:
            own["mem_fraction_static"] = round(CPU_FRACTION / replicas, 4)
    return replace(config, **own)


def _number(role: Role, config: TargetConfig | DraftConfig) -> tuple[int, int]:
    """How many replicas of a service share the machine, and the number of this one, from 0."""
    check_minimum(config, {"machine_replicas": 1})
    replicas, number = config.machine_replicas, claim_number(role)
    if number >= replicas:
        log.warning(
            "this is %s %d of the machine, and --machine-replicas is %d: it shares cores and devices with %s %d, and "
            "both are slower; with compose, set %s_REPLICAS in place of --scale",
            role, number + 1, replicas, role, number % replicas + 1, role.upper(),
        )  # fmt: skip
    return replicas, number % replicas


def _own_cores(role: Role, cores: Sequence[int], replicas: int, number: int) -> tuple[int, ...]:
    own = share_cores(cores, replicas)[number]
    if replicas > 1:
        log.info("%s %d of %d has the cores %s", role, number + 1, replicas, format_cores(own))
    return own


def _own_device(role: Role, device: str, replicas: int, number: int, ranks: int) -> str:
    """The device of one of several replicas: of those that a flag names, or of the GPUs that the process sees."""
    device = "cuda" if device == "auto" and has_gpu() else device
    return devices_of_replicas(role, device, replicas, ranks, len(gpus()) or None, "--machine-replicas")[number]


def share_of_gateway(config: GatewayConfig) -> GatewayConfig:
    """The gateway's flags, with "auto" replaced by its cores."""
    if config.cores != AUTO_CORES:
        return config
    return replace(config, cores=format_cores(_plan(workers=config.gateway_workers).gateway))


def share_of_draft(config: DraftConfig) -> DraftConfig:
    """The draft service's flags, with "auto" replaced by cores, niceness, drafter and tree shape as `outrider serve`
    sets them.

    Raises ConfigError for a draft model that is not on this machine and has no algorithm.
    """
    if config.cores != AUTO_CORES:
        return config
    replicas, number = _number("draft", config)
    own_place = draft_has_own_place(_plan(), draft_device=config.draft_device)
    drafter = resolve_drafter(config, config.model_path, own_place=own_place)
    plan = _plan(drafter.speculative_algorithm, drafts=replicas)
    drafter = replace(drafter, draft_ahead=draft_ahead(drafter, plan))
    shape = draft_tree(config, drafter, plan)
    own: dict[str, Any] = {} if shape is None else shape.flags()
    if replicas > 1 and drafter.speculative_algorithm in MODEL_ALGORITHMS:
        own["draft_device"] = _own_device("draft", config.draft_device, replicas, number, config.draft_tp_size)
    cores = _own_cores("draft", plan.draft, replicas, number)
    return replace(
        drafter, cores=format_cores(cores), niceness=config.niceness or draft_niceness(config, drafter, plan),
        network_cores=config.network_cores
        or (format_cores(sorted({*cores, *plan.shared})) if plan.shared else None), **own,
    )  # fmt: skip
