"""Benchmarks that need hardware run here on something tiny, so that they work where it is there."""

import torch

from bench import gpu
from bench.report import Report


def test_the_gpu_benchmark_runs():
    report = Report("gpu", "")
    gpu.Bench(gpu.TINY, torch.device("cpu"), report).run(["step", "engine"])
    assert not [note for note in report.notes if "failed" in note]
    assert {row["what"] for row in report.rows} == {"plain step", "verification", "engine's step"}
    assert all(row["ms"] > 0 for row in report.rows)
