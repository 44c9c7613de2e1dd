"""Statistical comparison of settings from paired rounds. Pure functions.

The ratio of a setting in a round is its speedup: its tokens/s over those of plain decoding on the same prompts in the
same round. A setting beats another if the 95 % confidence interval of the mean logarithm of the quotients of their
ratios (Student's t over the rounds) lies above zero; they tie if it contains zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from bench.harness.ratios import Ratio, ratio

Verdict = Literal["win", "tie", "lose"]
Row = Mapping[str, Any]


def verdict(ours: Sequence[float], others: Sequence[float]) -> Verdict:
    """The verdict on a setting against another, from their ratios in the same rounds."""
    quotient = ratio([a / b for a, b in zip(ours, others, strict=True)])
    if quotient.low > 1.0:
        return "win"
    return "lose" if quotient.high < 1.0 else "tie"


def over_plain(ratios: Sequence[float]) -> Verdict:
    """The verdict on a setting against plain decoding."""
    return verdict(ratios, [1.0] * len(ratios))


def adaptive_against_fixed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Adaptive trees against the best explicit tree, for each drafter, temperature and concurrency.

    The best of many is selected on the rounds that it is judged by, which slightly favours explicit trees.
    """
    cells = dict.fromkeys((r["drafter"], r["temperature"], r["concurrency"]) for r in rows if r["kind"] != "plain")
    compared = []
    for drafter, temperature, concurrency in cells:
        here = [
            r for r in rows if (r["drafter"], r["temperature"], r["concurrency"]) == (drafter, temperature, concurrency)
        ]
        adaptive = next((r for r in here if r["kind"] == "adaptive"), None)
        if adaptive is None:
            continue
        line = {
            "drafter": drafter,
            "temperature": temperature,
            "concurrency": concurrency,
            "adaptive": adaptive["ratio"],
            "over_plain": over_plain(adaptive["rounds"]),
        }
        fixed = max((r for r in here if r["kind"] == "fixed"), key=lambda r: r["ratio"], default=None)
        if fixed is not None:
            line |= {"best_fixed": fixed["setting"], "its_ratio": fixed["ratio"]}
            line |= {"over_best_fixed": verdict(adaptive["rounds"], fixed["rounds"])}
        compared.append(line)
    return compared


class Recommendation(NamedTuple):
    """A setting, its flags, and its speedup over plain decoding in all rounds and at all temperatures."""

    setting: str
    flags: str
    ratio: Ratio


def recommendations(rows: Sequence[Row]) -> dict[int, Recommendation | None]:
    """The recommended setting by concurrency, over all temperatures; None recommends plain decoding.

    It is the setting with the largest speedup among those that beat plain decoding. The best adaptive setting is
    preferred if the two tie, because it also adapts to other loads.
    """
    return {
        concurrency: _recommendation([r for r in rows if r["concurrency"] == concurrency and r["kind"] != "plain"])
        for concurrency in dict.fromkeys(r["concurrency"] for r in rows)
    }


def _recommendation(rows: Sequence[Row]) -> Recommendation | None:
    """The recommended setting from the rows of one concurrency."""
    rounds: dict[str, list[float]] = {}
    for row in rows:
        rounds.setdefault(row["setting"], []).extend(row["rounds"])
    good = [name for name, ratios in rounds.items() if over_plain(ratios) == "win"]
    if not good:
        return None
    chosen = best = max(good, key=lambda name: ratio(rounds[name]).mean)
    adaptive = [row["setting"] for row in rows if row["kind"] == "adaptive" and row["setting"] in good]
    if adaptive:
        other = max(adaptive, key=lambda name: ratio(rounds[name]).mean)
        chosen = best if verdict(rounds[best], rounds[other]) == "win" else other
    return Recommendation(chosen, next(r["flags"] for r in rows if r["setting"] == chosen), ratio(rounds[chosen]))
