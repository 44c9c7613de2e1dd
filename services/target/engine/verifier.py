"""Verification: from a step's samples to a session's accepted path, its bonus token, and whether it ends."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import EngineFault
from outrider.speculation.acceptance import accepted_path
from outrider.speculation.proposal import FinishReason
from outrider.speculation.tree import TreeSlice

_NOT_FINITE = "the model's logits are not finite; the session cannot go on"


class StepOutcome(NamedTuple):
    """What a step commits in one session.

    path:   accepted draft tokens that are committed, as indices into the draft
    tokens: [n] uint32, n >= 1: the path's tokens and then the bonus token, unless the session ended before it
    """

    path: list[int]
    tokens: NDArray[np.uint32]
    reason: FinishReason


def verify(draft: TreeSlice, sampled: NDArray[np.integer], stop_ids: AbstractSet[int], room: int) -> StepOutcome:
    """Walk the draft along the samples, and stop after the first token that ends the session.

    sampled: [N + 1], the tokens sampled after the root and after each draft token; -1 where none could be. Without a
    draft [n], those of n steps. room: most tokens that may be committed. Raises EngineFault if the bonus token could
    not be sampled.
    """
    if not len(draft.tokens):
        return _verify_plain(sampled, stop_ids, room)
    path, bonus = accepted_path(draft, sampled)
    if bonus < 0:
        raise EngineFault(_NOT_FINITE)
    tokens = [*draft.tokens[path].tolist(), bonus]
    for count, token in enumerate(tokens[:room], start=1):
        if token in stop_ids:
            return StepOutcome(path[:count], np.array(tokens[:count], np.uint32), FinishReason.STOP)
    reason = FinishReason.LENGTH if len(tokens) >= room else FinishReason.RUNNING
    return StepOutcome(path[:room], np.array(tokens[:room], np.uint32), reason)


def _verify_plain(sampled: NDArray[np.integer], stop_ids: AbstractSet[int], room: int) -> StepOutcome:
    """Without a draft, as most sessions of most steps are."""
    tokens = sampled.tolist()
    assert len(tokens) <= room, "a step samples no more than may be committed"
    if min(tokens) < 0:
        raise EngineFault(_NOT_FINITE)
    for count, token in enumerate(tokens, start=1):
        if token in stop_ids:
            return StepOutcome([], sampled[:count].astype(np.uint32), FinishReason.STOP)
    reason = FinishReason.LENGTH if room <= len(tokens) else FinishReason.RUNNING
    return StepOutcome([], sampled.astype(np.uint32), reason)
