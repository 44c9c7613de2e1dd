"""What is made of many replies: rates with their spread, ratios, and whether texts are the same."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from bench.peers.base import Facts, Reply

Replies = Mapping[str, Sequence[Reply]]  # by peer, one a prompt
Rates = Mapping[str, Sequence[float]]  # by peer, tokens a second of each group of requests at once


def median_and_quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def ratios(ours: Sequence[Reply], theirs: Sequence[Reply]) -> list[float]:
    """Rates over rates, prompt by prompt; prompts that either answers with less than two tokens tell nothing."""
    pairs = [(a.rate, b.rate) for a, b in zip(ours, theirs, strict=True) if min(a.tokens, b.tokens) > 1]
    return [a / b for a, b in pairs]


def same_texts(peers: Sequence[Facts], replies: Replies) -> dict[str, str]:
    """For each peer that drafts: how many of its texts are those of its own family without, same number format."""
    plain = {(facts.family, facts.weights): facts.name for facts in peers if not facts.speculation}
    found = {}
    for facts in peers:
        base = plain.get((facts.family, facts.weights))
        if facts.speculation and base is not None:
            pairs = zip(replies[facts.name], replies[base], strict=True)
            found[facts.name] = f"{sum(a.text == b.text for a, b in pairs)}/{len(replies[base])}"
    return found
