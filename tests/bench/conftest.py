"""Fixtures of all tests of benchmarks."""

import pytest

from bench.harness import report


@pytest.fixture(autouse=True)
def default_report_folder():
    """Restore the default folder of reports, which a test may change."""
    yield
    report.set_folder(None)


@pytest.fixture
def report_folder(tmp_path):
    """A temporary folder that reports are written to."""
    report.set_folder(tmp_path)
    return tmp_path
