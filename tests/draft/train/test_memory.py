"""Freed memory is reused instead of requested from the system again."""

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
import numpy as np
from services.draft.train.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
np.ones(8 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    np.ones(4 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library is configured")
def test_freed_memory_is_reused():
    def faults(how):
        done = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < 0.1 * faults("not")
