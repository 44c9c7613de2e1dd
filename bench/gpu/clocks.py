"""Clocks for what a device is asked to do, and what its memory gives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Clocks:
    """repeats: runs of which the best or the median counts."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def host(self, once: Callable[[], Any]) -> float:
        """Seconds on the host's clock, best of some runs, each to the device's end."""
        best = float("inf")
        for i in range(self.repeats + 3):
            self.synchronize()
            start = time.perf_counter()
            once()
            self.synchronize()
            best = min(best, time.perf_counter() - start) if i >= 3 else best
        return best

    def pace(self, once: Callable[[], Any]) -> float:
        """Seconds of one call among many in a row, which may leave work for the device behind; best of some rows."""
        rows = []
        for _ in range(4):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(self.repeats):
                once()
            self.synchronize()
            rows.append((time.perf_counter() - start) / self.repeats)
        return min(rows[1:])

    def device_alone(self, once: Callable[[], None]) -> float:
        """Seconds that the device takes, by the median of some replays of a captured run."""
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
        """Bytes a second that the device reads: the best of several sums over memory far larger than its caches."""
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
