"""A pytest plugin: the CPU kernels are compiled with less optimization, in a fraction of the time.

OUTRIDER_VECTORS=avx2 python -m pytest -p tests.support.emulated.less_optimized tests/target/kernels/test_kernels.py
"""

import pytest

from outrider.native import vectors


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any module of tests is imported: some of them ask for the kernels at once."""
    vectors._FLAGS = (*vectors._FLAGS, "-O1")  # type: ignore[misc]
