"""Metrics of what became of drafts' hints at the targets: how late they came, which were wasted, why steps had none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.wire.v1 import common_pb2

CAUSES = ("without_drafter", "paused", "late", "empty", "not_selected")
_LAGS = ("0.0", "1.0", "2.0", "4.0", "8.0", "16.0", "32.0", "+Inf")  # those of the wire's DraftStats.lags


@dataclass(eq=False)
class Hints(Collector):
    """What targets tell of it, by address; each counts for all gateways."""

    loads: dict[str, common_pb2.DraftStats] = field(default_factory=dict)

    def collect(self) -> Iterator[Metric]:
        """As Prometheus reads it; nothing of a target that has not had a hint yet."""
        for name, text, attribute in (
            ("drafted_tokens", "Draft nodes that came to a target.", "received_tokens"),
            ("wasted_draft_tokens", "Draft nodes that came to a target and were never verified.", "unverified_tokens"),
        ):
            counter = CounterMetricFamily(f"outrider_{name}", text, labels=("address",))
            for address, load in self.loads.items():
                counter.add_metric([address], getattr(load, attribute))
            yield counter
        misses = CounterMetricFamily(
            "outrider_hint_misses_by_cause",
            "Decoding steps of a session that had no draft node to verify, by why.",
            labels=("address", "cause"),
        )
        lag = HistogramMetricFamily(
            "outrider_draft_lag_tokens", "Tokens that a draft was behind its target when its answer came.",
            labels=("address",),
        )  # fmt: skip
        for address, load in self.loads.items():
            for cause in CAUSES:
                misses.add_metric([address, cause], getattr(load, f"steps_{cause}"))
            counts = [float(count) for count in accumulate(load.lag_histogram)]
            lag.add_metric([address], list(zip(_LAGS, counts, strict=False)), load.lag_tokens)
        yield misses
        yield lag
