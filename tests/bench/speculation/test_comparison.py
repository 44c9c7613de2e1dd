"""Verdicts and recommendations from paired rounds."""

import numpy as np
import pytest
from scipy import stats

from bench.harness.ratios import ratio
from bench.speculation import comparison


def row(setting, kind, *rounds, concurrency=1, temperature=0.0, drafter="D"):
    over = ratio(rounds)
    return {"setting": setting, "kind": kind, "drafter": drafter, "flags": f"--{setting}", "temperature": temperature,
            "concurrency": concurrency, "ratio": over.mean, "rounds": list(rounds)}  # fmt: skip


def test_intervals_equal_scipys():
    rng = np.random.default_rng(5)
    for count in (2, 4, 31, 40):
        logarithms = rng.normal(0.1, 0.2, count)
        over = ratio(np.exp(logarithms).tolist())
        low, high = stats.t.interval(0.95, count - 1, logarithms.mean(), stats.sem(logarithms))
        assert over.mean == pytest.approx(np.exp(logarithms.mean()))
        assert (over.low, over.high) == pytest.approx((np.exp(low), np.exp(high)), rel=0.01)
    assert comparison.verdict([1.5, 1.52, 1.48], [1.0, 1.02, 1.0]) == "win"
    assert comparison.verdict([1.0, 1.02, 1.0], [1.5, 1.52, 1.48]) == "lose"
    assert comparison.verdict([1.04, 5.74], [1.0, 1.0]) == "tie", "faster in both rounds, but with a wide interval"
    assert comparison.verdict([3.0, 1.0, 2.0], [2.9, 0.95, 1.9]) == "win", "the rounds differ more than the settings"
    assert comparison.over_plain([2.0]) == "tie"
    assert comparison.over_plain([1.0, 1.0]) == "tie"


def test_adaptive_against_best_explicit_tree():
    rows = [
        row("a", "adaptive", 1.52, 1.5, 1.51),
        row("f1", "fixed", 1.2, 1.2, 1.2),
        row("f2", "fixed", 1.3, 1.3, 1.31),
        row("a", "adaptive", 0.98, 1.01, 1.0, concurrency=8),
        row("f1", "fixed", 1.1, 1.12, 1.1, concurrency=8),
        row("f2", "fixed", 0.5, 0.5, 0.5, concurrency=8),
        row("n", "adaptive", 1.0, 1.1, 1.0, drafter="N"),
    ]
    first, second, third = comparison.adaptive_against_fixed(rows)
    assert (first["best_fixed"], first["over_best_fixed"], first["over_plain"]) == ("f2", "win", "win")
    assert (second["best_fixed"], second["over_best_fixed"], second["over_plain"]) == ("f1", "lose", "tie")
    assert "best_fixed" not in third


def recommended(*rows):
    return {concurrency: best and best.setting for concurrency, best in comparison.recommendations(rows).items()}


def test_recommendations():
    tree = row("f", "fixed", 1.6, 1.45, 1.5)
    adapts = row("a", "adaptive", 1.4, 1.5, 1.4)
    assert recommended(adapts, tree) == {1: "a"}, "they tie, and adaptive settings are preferred"
    assert recommended(adapts, row("f", "fixed", 1.6, 1.7, 1.6)) == {1: "f"}
    assert recommended(row("f", "fixed", 1.6, 0.9, 1.5)) == {1: None}, "its interval contains 1"
    assert recommended(row("f", "fixed", 1.6, 0.9, 1.6), row("g", "fixed", 1.1, 1.1, 1.1)) == {1: "g"}
    assert recommended(row("a", "adaptive", 0.9, 0.8, concurrency=8), tree) == {8: None, 1: "f"}
    cold = [row("a", "adaptive", 1.4, 1.4), row("f", "fixed", 1.3, 1.3)]
    hot = [row("a", "adaptive", 0.7, 0.7, temperature=1.0), row("f", "fixed", 1.2, 1.2, temperature=1.0)]
    both = comparison.recommendations([*cold, *hot])[1]
    assert (both.setting, both.flags) == ("f", "--f"), "over all temperatures"
    assert both.ratio.mean == pytest.approx((1.3 * 1.2) ** 0.5)
    assert comparison.recommendations([]) == {}
