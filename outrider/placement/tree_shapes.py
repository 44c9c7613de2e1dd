"""The shape of draft trees: from the flags, or for shared cores."""

from __future__ import annotations

from outrider.config import FED_ALGORITHMS, MODEL_ALGORITHMS, DrafterOptions, SharedOptions
from outrider.config.draft import DraftAhead, DraftOptions
from outrider.placement.cores import CorePlan, draft_has_own_place
from outrider.speculation.shape import TreeShape, explicit_shape

# Measured to be the fastest beside a target on the same two cores; `outrider bench speculation` compares shapes.
_SHARED_CORES_SHAPE = TreeShape(steps=3, topk=4, rows=12)
# Niceness of a draft service that computes only while the target waits for it, or while it computes a prompt.
_AWAITED_NICENESS = 2


def tree_shape(flags: SharedOptions, algorithm: str) -> TreeShape | None:
    """The shape that the flags set for a model-based drafter; None for adaptive trees. Raises ConfigError."""
    if algorithm not in MODEL_ALGORITHMS:
        return None
    return explicit_shape(flags.speculative_num_steps, flags.speculative_eagle_topk, flags.speculative_num_draft_tokens)


def draft_tree(flags: SharedOptions, draft: DrafterOptions, cores: CorePlan) -> TreeShape | None:
    """The shape of the draft service's trees: that of the flags, or one for shared cores; None for adaptive trees.

    Adaptive trees grow ahead while the target verifies; on the target's own cores that costs as much time as it saves.
    On shared cores a head therefore drafts a whole tree of a fixed shape while the target waits. The target measures
    how many of these draft tokens to verify, and whether to wait at all.
    """
    shape = tree_shape(flags, draft.speculative_algorithm)
    if shape is None and cores.together and _is_head(draft):
        return _SHARED_CORES_SHAPE
    return shape


def draft_ahead(draft: DraftOptions, cores: CorePlan, *, target_device: str = "auto") -> DraftAhead:
    """--draft-ahead of the draft service: that of the flag, or off for a model that computes on the target's cores."""
    own_place = draft_has_own_place(cores, target_device=target_device, draft_device=draft.draft_device)
    alone = draft.speculative_algorithm == "STANDALONE" and not own_place
    return "off" if draft.draft_ahead == "auto" and alone else draft.draft_ahead


def _is_head(draft: DrafterOptions) -> bool:
    """True for a head, whose trees may have any depth and cost time by level.

    The trees of MTP layers, which need no draft path, may not; a block costs one pass, and is never drafted ahead.
    """
    head = draft.speculative_algorithm in FED_ALGORITHMS and draft.speculative_algorithm != "DFLASH"
    return head and draft.speculative_draft_model_path is not None


def draft_niceness(flags: SharedOptions, draft: DraftOptions, cores: CorePlan) -> int:
    """Niceness of the draft service. One that drafts ahead on the target's cores must not delay the target."""
    waited_for = draft_tree(flags, draft, cores) is not None or draft.draft_ahead == "off"
    waited_for = waited_for or draft.speculative_algorithm == "DFLASH"
    return min(cores.niceness, _AWAITED_NICENESS) if waited_for else cores.niceness
