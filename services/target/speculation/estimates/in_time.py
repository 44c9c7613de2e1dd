"""Predicts a mode that waits for no draft, before it is tried."""

from __future__ import annotations

import math


def share_in_time(accepted: float, step: float, latency: float) -> float:
    """Share of steps with draft tokens where none is held: those that an answer still reaches, because the tokens
    committed meanwhile are in its tree.

    accepted: draft tokens A of a step that has the answer to the last commit; step, latency: seconds, of a step and
    from a commit to its answer, which takes m steps. As if acceptance were equal at all depths, a = A / (1 + A). A step
    without draft tokens commits one token, and one with draft tokens follows with probability a^m. A step with draft
    tokens commits 1 + k with probability (1 - a) a^k, and one with draft tokens follows with probability a^m / (1 + a).
    """
    chance = accepted / (1.0 + accepted)
    after_plain = chance ** max(math.ceil(latency / step), 1)
    return after_plain / (1.0 + after_plain - after_plain / (1.0 + chance))
