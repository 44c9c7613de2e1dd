"""Metrics under vLLM's names, where they mean the same, so that its dashboards and other readers read ours."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.metrics import Tally

_LABELS = ("model_name", "engine")


class SpeculationForPeers(Collector):
    """`vllm:spec_decode_*`: a draft is a step that verified a node; a position is a depth, the first is 0."""

    def __init__(self, tally: Tally, model: str) -> None:
        """model: the served name."""
        self._tally = tally
        self._own = [model, "0"]

    def collect(self) -> Iterator[Metric]:
        """As Prometheus reads it. Positions are told as far as any was accepted."""
        tally = self._tally
        for name, text, value in (
            ("drafts", "Steps that verified draft tokens.", sum(tally.drafts)),
            ("draft_tokens", "Draft tokens that were verified.", tally.verified),
            ("accepted_tokens", "Draft tokens that were accepted.", tally.accepted),
        ):
            counter = CounterMetricFamily(f"vllm:spec_decode_num_{name}", text, labels=_LABELS)
            counter.add_metric(self._own, value)
            yield counter
        # A step that accepted n tokens accepted one at each of the positions 0 .. n - 1.
        reached = list(accumulate(reversed(tally.drafts)))[::-1][1:]
        counter = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted, by position.",
            labels=(*_LABELS, "position"),
        )
        for position, count in enumerate(reached):
            if count or not position:
                counter.add_metric([*self._own, str(position)], count)
        yield counter
