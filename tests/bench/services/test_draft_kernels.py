"""The benchmark of the draft service's attention, interpreted on the CPU."""

import pytest

from bench.harness.report import Report
from bench.services import draft_kernels


@pytest.mark.long
def test_kernels_run():
    report = Report("draft-kernels", "")
    draft_kernels.run(draft_kernels.TINY, "gpu", report, interpret=True)
    assert len(report.notes) == 1, "a note of bandwidth, none of failures"
    assert {row["kernel"] for row in report.rows} >= {"picked", "plain"}
    assert all(row["us"] > 0 for row in report.rows)
