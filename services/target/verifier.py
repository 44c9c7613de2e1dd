"""What a step's samples mean for a session: the accepted path, the bonus token, and whether the session ends."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.errors import EngineFault
from outrider.speculation.acceptance import accepted_path
from outrider.speculation.proposal import FinishReason
from outrider.speculation.tree import TreeSlice


@dataclass(frozen=True)
class Verdict:
    """What one step commits in one session.

    path:   accepted nodes that are committed, as indices into the draft
    tokens: [n] uint32, n >= 1: the path's tokens and then the bonus token, unless the session ended before it
    """

    path: list[int]
    tokens: NDArray[np.uint32]
    reason: FinishReason


def settle(draft: TreeSlice, sampled: NDArray[np.integer], stop_ids: AbstractSet[int], room: int) -> Verdict:
    """Walk the draft along the samples, and stop behind the first token that ends the session.

    sampled: [N + 1], the tokens drawn after the root and after each node; -1 where nothing could be drawn.
    room: most tokens that may be committed. Raises EngineFault if the bonus token could not be drawn.
    """
    path, bonus = accepted_path(draft, sampled)
    if bonus < 0:
        raise EngineFault("the model's logits are not finite; the session cannot go on")
    tokens = [*draft.tokens[path].tolist(), bonus]
    for count, token in enumerate(tokens[:room], start=1):
        if token in stop_ids:
            return Verdict(path[:count], np.array(tokens[:count], np.uint32), FinishReason.STOP)
    reason = FinishReason.LENGTH if len(tokens) >= room else FinishReason.RUNNING
    return Verdict(path[:room], np.array(tokens[:room], np.uint32), reason)
