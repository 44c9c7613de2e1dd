"""CPU affinity and time slices of compute threads and network threads."""

import json
import os
import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes, json, os, threading
from outrider.process import cpu_affinity

def now():
    found = cpu_affinity.SchedAttributes()
    number = {"x86_64": 315, "aarch64": 275}[os.uname().machine]
    ctypes.CDLL(None).syscall(number, 0, ctypes.byref(found), ctypes.sizeof(found), 0)
    return [sorted(os.sched_getaffinity(0)), found.runtime, found.nice]

def in_thread(work=lambda: None):
    results = []
    thread = threading.Thread(target=lambda: (work(), results.append(now())))
    thread.start()
    thread.join()
    return results[0]

cores = sorted(os.sched_getaffinity(0))
os.nice(3)
os.sched_setaffinity(0, cores[-1:])
before = now()
cpu_affinity.run_network_on(cores)
network, child = now(), in_thread()
computing = in_thread(lambda: cpu_affinity.run_compute_on(cores[-1:]))
print(json.dumps([cores, before, network, child, computing, now()]))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinities")
def test_network_threads_have_all_cores_and_short_slices_compute_threads_keep_theirs():
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    cores, before, network, child, computing, after = json.loads(result.stdout)
    assert before[0] == computing[0] == cores[-1:]
    assert network == child == after
    assert network[0] == cores
    assert {facts[2] for facts in (before, network, child, computing)} == {3}, "niceness stays"
    if before[1]:  # the system has time slices
        assert network[1] == 100_000
        assert computing[1] > network[1]
