"""A process's own share of the machine, where nobody divides it: `--cores auto`.

Three containers on one machine start each by itself. Each then works out the plan that `outrider serve` would make for
all of them, and takes its part: cores, and for a draft on the target's cores the trees that suit it there. Whoever does
not know what drafts believes that a model does.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from outrider.config import AUTO_CORES, DraftConfig, GatewayConfig, TargetConfig, format_cores
from outrider.drafts import with_drafter
from outrider.placement.cores import CorePlan, plan_cores
from outrider.placement.tree_shapes import draft_niceness, draft_tree


def _plan(algorithm: str = "EAGLE3", workers: int = 1) -> CorePlan:
    return plan_cores(sorted(os.sched_getaffinity(0)), algorithm, workers)


def share_of_target(config: TargetConfig) -> TargetConfig:
    """The target's flags, with its cores in the place of "auto"."""
    return replace(config, cores=format_cores(_plan().target)) if config.cores == AUTO_CORES else config


def share_of_gateway(config: GatewayConfig) -> GatewayConfig:
    """The gateway's flags, with its cores in the place of "auto"."""
    if config.cores != AUTO_CORES:
        return config
    return replace(config, cores=format_cores(_plan(workers=config.gateway_workers).gateway))


def share_of_draft(config: DraftConfig) -> DraftConfig:
    """The draft's flags, with all that `outrider serve` would say of its cores in the place of "auto".

    Raises ConfigError for a draft without its algorithm.
    """
    if config.cores != AUTO_CORES:
        return config
    algorithm = with_drafter(config, config.model_path).speculative_algorithm
    plan = _plan(algorithm)
    shape = draft_tree(config, algorithm, plan)
    own: dict[str, Any] = {} if shape is None else shape.flags()
    return replace(
        config, cores=format_cores(plan.draft), niceness=config.niceness or draft_niceness(config, algorithm, plan),
        network_cores=config.network_cores or (format_cores(plan.network) if plan.shared else None), **own,
    )  # fmt: skip
