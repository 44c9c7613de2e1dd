"""The expected throughput of one session, with a tree after each commit or with trees drafted ahead.

    s   seconds of a target's step
    L   seconds from a commit to its answer: both ways of the network, and the tree
    τ   accept length of a step that has the tree of the last commit, bonus token included
    a   probability that the first draft token is accepted: 1 - 1/τ, as if acceptance were equal at all depths
    p   probability that a tree holds the bonus token of a step that verifies a part of it, and tokens below

Waiting, each step takes s + L. Otherwise a step that finds no draft tokens commits one token, as does each step until
an answer comes that is not overtaken: the first one takes m = ⌈L / s⌉ steps, and m - 1 of their tokens must lie in it.
A step that finds some is followed by others with probability p. It is the outcome push of outcome enumeration, with the
misses' answers in the following steps instead of a fallback.
"""

from __future__ import annotations

import math


def waiting(tau: float, step: float, latency: float) -> float:
    """Tokens/s if each step waits for its tree."""
    return tau / (step + latency)


def ahead(tau: float, step: float, latency: float, prepared: float) -> float:
    """Tokens/s if no step waits. prepared: p."""
    plain, run = plain_steps(tau, step, latency), 1 / (1 - prepared)
    share = run / (run + plain)  # of steps with draft tokens
    return (share * tau + 1 - share) / step


def plain_steps(tau: float, step: float, latency: float) -> float:
    """Steps without draft tokens after a step whose bonus token was not prepared."""
    first = max(math.ceil(latency / step), 1)
    accepted = 1 - 1 / tau
    if first > 1 and not accepted:
        return math.inf
    return first - 1 + 1 / accepted ** (first - 1)


def prepared_of(drafted: float, tau: float, step: float, latency: float) -> float:
    """p, from the share of steps that had draft tokens while none waited."""
    if drafted >= 1.0:
        return 1.0 - 1e-9
    return max(0.0, 1.0 - (1.0 - drafted) / (drafted * plain_steps(tau, step, latency))) if drafted else 0.0
