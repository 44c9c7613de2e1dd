"""The expected speedup in limiting cases."""

import pytest

from bench.scale.theory import draft_if_ready, expected_tokens, speedup, wait_for_draft


def test_limiting_cases():
    def cost(n):
        return 0.01 + 0.0005 * n

    assert expected_tokens(0.0, 5) == 1.0
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)
    assert speedup(0.0, cost, 0.001, 8) == 1.0  # plain decoding is the lower bound
    assert speedup(1.0, cost, 10.0, 8) == pytest.approx(8 * cost(0) / cost(7), rel=1e-6)  # does not wait
    assert wait_for_draft(0.8, 4, cost, 0.0) > wait_for_draft(0.8, 4, cost, 0.02)
    assert draft_if_ready(0.8, 4, cost, 0.02, 8) >= 1 / cost(0)
    ratios = [speedup(a / 10, cost, 0.002, 8) for a in range(11)]
    assert ratios == sorted(ratios)
