"""What should come out: tokens a second with hints over those without, for a chain of hints and one session.

    acceptance a   probability that a hint is right once those before it are
    rows n         hints of a step; E(n) = (1 - a^(n+1)) / (1 - a) tokens come of it, the bonus included
    cost(n)        seconds of a step with n hints, measured; cost(0) is a plain step
    away           seconds from a commit until hints for it are there: the draft's own, and the way there and back

The target may wait for hints, or go on without: then a step has hints only if those for it were sent with the last
ones, that is if all of these were right, and the one after them. It does what pays, with as many hints as pay.
"""

from __future__ import annotations

from collections.abc import Callable

Cost = Callable[[int], float]


def expected_tokens(acceptance: float, rows: int) -> float:
    """Tokens that a step with so many hints brings."""
    if acceptance >= 1.0:
        return rows + 1.0
    return (1 - acceptance ** (rows + 1)) / (1 - acceptance)


def waiting(acceptance: float, rows: int, cost: Cost, away: float) -> float:
    """Tokens a second if every step waits for its hints."""
    return expected_tokens(acceptance, rows) / (cost(rows) + away)


def going_on(acceptance: float, rows: int, cost: Cost, away: float, length: int) -> float:
    """Tokens a second if no step waits. length: tokens of a chain, of which a step verifies `rows`.

    After a step whose hints were not all right, plain steps follow until hints for what was committed are there; those
    of plain steps keep in line with the chain as long as it is right.
    """
    hit = expected_tokens(acceptance, rows)
    stays = acceptance ** (rows + 1) if length > rows else 0.0  # the next step has hints, too
    plain_steps = max(1.0, away / cost(0))
    runs = 1 / (1 - stays) if stays < 1.0 else 1e9  # steps with hints between two lapses
    return (runs * hit + plain_steps) / (runs * cost(rows) + plain_steps * cost(0))


def speedup(acceptance: float, cost: Cost, away: float, length: int) -> float:
    """Tokens a second with the best number of hints and the better of both ways, over plain decoding's; at least 1."""
    plain = 1 / cost(0)
    ways = [
        way
        for rows in range(1, length + 1)
        for way in (waiting(acceptance, rows, cost, away), going_on(acceptance, rows, cost, away, length))
    ]
    return max(plain, *ways) / plain
