"""The GPU benchmark with a tiny model on the CPU."""

import pytest
import torch

from bench.gpu import run as gpu
from bench.harness.report import Report


@pytest.mark.long
def test_steps_and_engine_run(monkeypatch):
    monkeypatch.setattr(Report, "save", lambda *_: None)
    report = Report("gpu", "")
    for _ in gpu.Bench(gpu.TINY, torch.device("cpu"), report).run(["step", "engine"]):
        gpu.plot(report)
    assert not [note for note in report.notes if "failed" in note]
    assert {row["what"] for row in report.rows} == {"plain step", "verification", "engine's step"}
    assert all(row["ms"] > 0 for row in report.rows)
