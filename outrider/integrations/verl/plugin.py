"""Importing this registers Outrider with verl, as `actor_rollout_ref.rollout.name=outrider`.

verl imports it in each of its processes, through the entry point `verl.plugins` of this distribution, or as named by
VERL_USE_EXTERNAL_MODULES=outrider.integrations.verl.plugin.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "outrider"


def _replica_class() -> Any:
    from outrider.integrations.verl.replica import OutriderReplica

    return OutriderReplica


# verl 0.9.1 offers a function for one of its two registries.
base._ROLLOUT_REGISTRY[NAME, "async"] = "outrider.integrations.verl.rollout.OutriderRollout"
RolloutReplicaRegistry.register(NAME, _replica_class)
