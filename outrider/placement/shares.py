"""`--cores auto`: the share of the machine that `outrider serve` would give a process started without it.

Three containers on one machine start independently. Each computes the plan of `outrider serve` for all three and takes
its own part: cores, and, for a draft service on the target's cores, the drafter for AUTO and the tree shape. Target and
gateway do not know the drafter and assume a draft model.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from outrider.config import AUTO_CORES, DraftConfig, GatewayConfig, TargetConfig, format_cores
from outrider.drafts import resolve_drafter
from outrider.placement.cores import CorePlan, draft_has_own_place, plan_cores
from outrider.placement.tree_shapes import draft_ahead, draft_niceness, draft_tree


def _plan(algorithm: str = "EAGLE3", workers: int = 1) -> CorePlan:
    return plan_cores(sorted(os.sched_getaffinity(0)), algorithm, workers)


def share_of_target(config: TargetConfig) -> TargetConfig:
    """The target's flags, with "auto" replaced by its cores."""
    return replace(config, cores=format_cores(_plan().target)) if config.cores == AUTO_CORES else config


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
    own_place = draft_has_own_place(_plan(), draft_device=config.draft_device)
    drafter = resolve_drafter(config, config.model_path, own_place=own_place)
    plan = _plan(drafter.speculative_algorithm)
    drafter = replace(drafter, draft_ahead=draft_ahead(drafter, plan))
    shape = draft_tree(config, drafter, plan)
    own: dict[str, Any] = {} if shape is None else shape.flags()
    return replace(
        drafter, cores=format_cores(plan.draft), niceness=config.niceness or draft_niceness(config, drafter, plan),
        network_cores=config.network_cores or (format_cores(plan.network) if plan.shared else None), **own,
    )  # fmt: skip
