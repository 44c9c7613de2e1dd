"""Skips tests that need Triton's interpreter, which runs kernels on CPU tensors, where it does not work."""

import os

import numpy as np
import pytest


def need_interpreter() -> None:
    """Skip the calling test, or the module that calls this at its top."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton's interpreter before 3.7 does not work with NumPy 2.4", allow_module_level=True)
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this machine has a GPU, on which tests/gpu runs the kernels", allow_module_level=True)
