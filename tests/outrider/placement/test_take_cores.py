"""CPU cores and niceness of a process at its start."""

import os
import subprocess
import sys

import pytest

from outrider.errors import ConfigError
from outrider.process.process import take_cores


def test_a_process_has_the_niceness_of_its_flag():
    script = (
        "import os; from outrider.process.process import take_cores; "
        "before = os.nice(0); take_cores('{core}', 7); print(os.nice(0) - before, sorted(os.sched_getaffinity(0)))"
    )
    core = max(os.sched_getaffinity(0))
    command = [sys.executable, "-c", script.format(core=core)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True)
    assert result.stdout.split(maxsplit=1) == ["7", f"[{core}]\n"]


@pytest.mark.parametrize("niceness", [-1, 20])
def test_priority_cannot_be_taken_from_others(niceness):
    with pytest.raises(ConfigError, match="--niceness must lie between 0 and 19"):
        take_cores(None, niceness)
