"""The shape of the draft's trees: what the flags say, or what suits the cores."""

from __future__ import annotations

from dataclasses import replace

from outrider.config import MODEL_ALGORITHMS, ServeConfig
from outrider.speculation.shape import TreeShape, explicit_shape
from outrider.supervisor.cores import CorePlan

# Heads whose trees may have any depth; those of MTP layers may not.
_HEADS = ("EAGLE", "EAGLE3")
# The best of those measured beside a target on the same two cores (docs/benchmarks/speculation.md).
_ON_SHARED_CORES = TreeShape(steps=3, topk=4, rows=12)


def tree_shape(config: ServeConfig) -> TreeShape | None:
    """The shape that the flags give trees of a model; None if they adapt. Raises ConfigError."""
    shared = config.shared
    if config.draft.speculative_algorithm not in MODEL_ALGORITHMS:
        return None
    rows = shared.speculative_num_draft_tokens
    return explicit_shape(shared.speculative_num_steps, shared.speculative_eagle_topk, rows)


def with_tree(config: ServeConfig, cores: CorePlan) -> ServeConfig:
    """The same with an explicit tree where a head computes on the target's cores, unless the flags shape one.

    Trees that adapt grow ahead, while the target verifies; on its own cores that costs the time that it brings. There a
    tree is better grown while the target waits, and a fixed one comes whole.
    """
    apart = not set(cores.target) & set(cores.draft)
    if apart or config.draft.speculative_algorithm not in _HEADS or tree_shape(config) is not None:
        return config
    steps, topk, rows = _ON_SHARED_CORES.steps, _ON_SHARED_CORES.topk, _ON_SHARED_CORES.rows
    flags = {"speculative_num_steps": steps, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": rows}
    return replace(config, shared=replace(config.shared, **flags))
