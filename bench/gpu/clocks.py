"""Timers for work on a device, and its memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Clocks:
    """Timers of a device. repeats: timed runs."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def host(self, once: Callable[[], Any]) -> float:
        """Seconds on the host's clock until the device is idle: the best of `repeats` runs, after 3 for warm-up."""
        best = float("inf")
        for i in range(self.repeats + 3):
            self.synchronize()
            start = time.perf_counter()
            once()
            self.synchronize()
            best = min(best, time.perf_counter() - start) if i >= 3 else best
        return best

    def pace(self, once: Callable[[], Any]) -> float:
        """Seconds per call of `repeats` calls without synchronization between them: the best of 3 series."""
        series = []
        for _ in range(4):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(self.repeats):
                once()
            self.synchronize()
            series.append((time.perf_counter() - start) / self.repeats)
        return min(series[1:])

    def device_alone(self, once: Callable[[], None]) -> float:
        """Seconds on the device's clock: the median of `repeats` replays of a captured CUDA graph."""
        if self.device.type != "cuda":
            return self.host(once)
        once()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            once()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        seconds = []
        for _ in range(self.repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        return float(np.median(seconds))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def read_bandwidth(self) -> float:
        """Read bandwidth in bytes/s: the best of five sums over memory far larger than the device's caches."""
        count = 1 << 31 if self.device.type == "cuda" else 1 << 24
        numbers = torch.ones(count, dtype=torch.float32, device=self.device)
        best = 0.0
        for _ in range(5):
            self.synchronize()
            start = time.perf_counter()
            numbers.sum()
            self.synchronize()
            best = max(best, count * 4 / (time.perf_counter() - start))
        return best
