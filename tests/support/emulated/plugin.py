"""A pytest plugin: compiled kernels are those of another processor, cross-compiled, under an emulator.

    OUTRIDER_EMULATED=neon python -m pytest -p tests.support.emulated.plugin tests/target/kernels/test_kernels.py

OUTRIDER_EMULATED: name of a kind in outrider.native.vectors, perhaps with `/operators`, which leaves out programs.
"""

import os

import pytest

from outrider.native import vectors
from tests.support.emulated import kernels

VARIABLE = "OUTRIDER_EMULATED"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any module of tests is imported: some of them ask for the kernels at once."""
    name, _, part = os.environ[VARIABLE].partition("/")
    kind = vectors.KINDS[name]
    if reason := kernels.lacking():
        raise pytest.UsageError(f"kernels of {kind.name} cannot be emulated: {reason}")
    kernels.substitute(kind, whole=part != "operators")
