"""The shape of the draft's trees: what the flags say, or what suits the cores."""

from __future__ import annotations

from outrider.config import MODEL_ALGORITHMS, SharedOptions
from outrider.placement.cores import CorePlan
from outrider.speculation.shape import TreeShape, explicit_shape

# Heads whose trees may have any depth; those of MTP layers may not.
_HEADS = ("EAGLE", "EAGLE3")
# It paid beside a target on the same two cores; `outrider bench speculation` compares it with others.
_ON_SHARED_CORES = TreeShape(steps=3, topk=4, rows=12)
# How far a draft gives way that computes only while the target waits for it, or has a prompt to read.
_WAITED_FOR = 2


def tree_shape(flags: SharedOptions, algorithm: str) -> TreeShape | None:
    """The shape that the flags give trees of a model; None if they adapt. Raises ConfigError."""
    if algorithm not in MODEL_ALGORITHMS:
        return None
    return explicit_shape(flags.speculative_num_steps, flags.speculative_eagle_topk, flags.speculative_num_draft_tokens)


def draft_tree(flags: SharedOptions, algorithm: str, cores: CorePlan) -> TreeShape | None:
    """The shape of the trees that the draft grows: that of the flags, or one that suits the cores; None if they adapt.

    Trees that adapt grow ahead, while the target verifies; on its own cores that costs the time that it brings. There
    a head's tree is better grown while the target waits, and one of a fixed shape comes whole. How much of it is
    verified, and whether it is waited for at all, the target decides by what it measures.
    """
    shape = tree_shape(flags, algorithm)
    if shape is None and cores.together and algorithm in _HEADS:
        return _ON_SHARED_CORES
    return shape


def draft_niceness(flags: SharedOptions, algorithm: str, cores: CorePlan) -> int:
    """How far the draft gives way on the target's cores. One that drafts ahead there must not hold it up."""
    waited_for = draft_tree(flags, algorithm, cores) is not None
    return min(cores.niceness, _WAITED_FOR) if waited_for else cores.niceness
