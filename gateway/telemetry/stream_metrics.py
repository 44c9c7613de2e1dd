"""Metrics of the streams to the services: frames and bytes by stream, direction and transport."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.streams.traffic import Traffic

_LABELS = ("stream", "direction", "transport")


class TrafficCollector(Collector):
    """The counts of all links."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def collect(self) -> Iterator[Metric]:
        """Metric families; without values before the first stream."""
        frames = CounterMetricFamily(
            "outrider_stream_frames",
            "Frames between the gateway and the services; stream features: those with hidden states, once more.",
            labels=_LABELS,
        )
        sizes = CounterMetricFamily(
            "outrider_stream_bytes",
            "Bytes of those frames; stream features: of the hidden states in them.",
            labels=_LABELS,
        )
        for lane, count in self._traffic.counts.items():
            frames.add_metric(list(lane), count.frames)
            sizes.add_metric(list(lane), count.bytes)
        yield frames
        yield sizes
