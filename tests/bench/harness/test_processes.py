"""Child processes of benchmarks: they end with the benchmark, and failures have readable errors."""

import os
import subprocess
import sys
import time

import pytest

from bench.harness.errors import BenchError
from bench.harness.processes import output_of, running, wait_until
from tests.support.bench.processes import wait_ended

BENCHMARK = """
import os, sys, time
from bench.harness.processes import output_of, running
from bench.serve.outrider_system import served
from bench.streams.pingpong import round_trips
from bench.streams.run import system
command = [sys.executable, "-m", "outrider"]
os.chdir(sys.argv[1])
"""


# A statement that starts processes, and their number.
STARTERS = {
    "with running(command): time.sleep(3600)": 1,
    "output_of(command)": 1,
    "with served('model', [], 'float32'): pass": 1,
    "round_trips('socket', [1])": 1,
    "with system('.'): pass": 3,
}


# In the working directory of a benchmark, a module with this text takes precedence over the installed one.
STARTED = "import os, time\nopen(f'{os.getpid()}.pid', 'w').close()\ntime.sleep(3600)\n"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("starter", STARTERS)
def test_child_processes_end_when_the_benchmark_is_killed(starter, tmp_path):
    for module in ("outrider/__main__", "gateway/__main__", "bench/streams/pingpong", "bench/streams/fakes"):
        file = tmp_path / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in file.relative_to(tmp_path).parents[:-1]:
            (tmp_path / folder / "__init__.py").touch()
        file.write_text(STARTED)
    benchmark = subprocess.Popen([sys.executable, "-c", BENCHMARK + starter, str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while len(pids := [int(file.stem) for file in tmp_path.glob("*.pid")]) < STARTERS[starter]:
            assert benchmark.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        benchmark.kill()
        benchmark.wait()
    wait_ended(pids, 60)


def test_errors_name_a_missing_program(tmp_path):
    missing = str(tmp_path / "llama-server")
    serves = rf"'{missing}', '--port', '1'.* exit code 1:\nerror: {missing} cannot be run: No such file"
    with (tmp_path / "log").open("w+") as log, running([missing, "--port", "1"], stderr=log) as child:  # noqa: SIM117
        with pytest.raises(BenchError, match=serves):
            wait_until(child, lambda: False, 60, lambda: os.pread(log.fileno(), 1000, 0).decode())
    with pytest.raises(
        BenchError, match=rf"^{missing} ended with code 1:\nerror: {missing} cannot be run: No such file"
    ):
        output_of([missing])
