"""Figures from replies: rates with quartiles, speedups, and counts of equal texts. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from bench.peers.base import PeerInfo, Reply

Replies = Mapping[str, Sequence[Reply]]  # by peer, one per prompt
Rates = Mapping[str, Sequence[float]]  # by peer, tokens/s of each group of concurrent requests


def median_and_quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def ratios(ours: Sequence[Reply], theirs: Sequence[Reply]) -> list[float]:
    """Speedups per prompt; prompts to which either answers with less than two tokens are skipped."""
    pairs = [(a.rate, b.rate) for a, b in zip(ours, theirs, strict=True) if min(a.tokens, b.tokens) > 1]
    return [a / b for a, b in pairs]


def equal_texts(peers: Sequence[PeerInfo], replies: Replies) -> dict[str, str]:
    """For each peer with speculation: how many texts equal those of plain decoding in its family and number format."""
    plain = {(info.family, info.weights): info.name for info in peers if not info.speculation}
    found = {}
    for info in peers:
        base = plain.get((info.family, info.weights))
        if info.speculation and base is not None:
            pairs = zip(replies[info.name], replies[base], strict=True)
            found[info.name] = f"{sum(a.text == b.text for a, b in pairs)}/{len(replies[base])}"
    return found
