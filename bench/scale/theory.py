"""The expected speedup of speculation over plain decoding, for draft chains and one session.

    acceptance a    probability that a draft token is correct if those before it are
    draft tokens n  per step; E(n) = (1 - a^(n+1)) / (1 - a) tokens are committed, bonus included
    cost(n)         seconds of a step with n draft tokens, measured; cost(0) is a plain step
    draft latency   seconds from a commit to the arrival of its proposal: drafting and both ways of the network

In mode WAIT_FOR_DRAFT, each step waits for its proposal. In mode DRAFT_IF_READY no step waits: a step has draft tokens
only if they were sent with the previous proposal, that is if all of its draft tokens and the one after them were
correct. The expectation is the faster mode with the best number of draft tokens, and at least plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable

Cost = Callable[[int], float]


def expected_tokens(acceptance: float, draft_tokens: int) -> float:
    """Tokens committed by a step, bonus included."""
    if acceptance >= 1.0:
        return draft_tokens + 1.0
    return (1 - acceptance ** (draft_tokens + 1)) / (1 - acceptance)


def wait_for_draft(acceptance: float, draft_tokens: int, cost: Cost, draft_latency: float) -> float:
    """Tokens/s if every step waits for its proposal."""
    return expected_tokens(acceptance, draft_tokens) / (cost(draft_tokens) + draft_latency)


def draft_if_ready(acceptance: float, draft_tokens: int, cost: Cost, draft_latency: float, length: int) -> float:
    """Tokens/s if no step waits. length: of a proposed chain, of which a step verifies `draft_tokens`.

    After a step with a rejected draft token, plain steps follow until the proposal for its commit arrives. The tokens
    of plain steps continue the chain as long as it is correct.
    """
    committed = expected_tokens(acceptance, draft_tokens)
    # Probability that the next step has draft tokens, too.
    continues = acceptance ** (draft_tokens + 1) if length > draft_tokens else 0.0
    plain_steps = max(1.0, draft_latency / cost(0))
    run_length = 1 / (1 - continues) if continues < 1.0 else 1e9  # consecutive steps with draft tokens
    return (run_length * committed + plain_steps) / (run_length * cost(draft_tokens) + plain_steps * cost(0))


def speedup(acceptance: float, cost: Cost, draft_latency: float, length: int) -> float:
    """Speedup over plain decoding in the faster mode, with the best number of draft tokens; at least 1."""
    plain = 1 / cost(0)
    rates = [wait_for_draft(acceptance, n, cost, draft_latency) for n in range(1, length + 1)]
    rates += [draft_if_ready(acceptance, n, cost, draft_latency, length) for n in range(1, length + 1)]
    return max(plain, *rates) / plain
