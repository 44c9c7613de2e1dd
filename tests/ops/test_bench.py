"""Benchmarks that need hardware run here on something tiny, so that they work where it is there."""

import torch

from bench import draft_kernels, gpu
from bench.report import Report


def test_the_gpu_benchmark_runs():
    report = Report("gpu", "")
    gpu.Bench(gpu.TINY, torch.device("cpu"), report).run(["step", "engine"])
    assert not [note for note in report.notes if "failed" in note]
    assert {row["what"] for row in report.rows} == {"plain step", "verification", "engine's step"}
    assert all(row["ms"] > 0 for row in report.rows)


def test_the_benchmark_of_the_drafts_kernels_runs():
    report = Report("draft-kernels", "")
    draft_kernels.run(draft_kernels.TINY, "gpu", report, interpret=True)
    assert len(report.notes) == 1, "a note of bandwidth, none of failures"
    assert {row["kernel"] for row in report.rows} >= {"picked", "plain"}
    assert all(row["us"] > 0 for row in report.rows)
