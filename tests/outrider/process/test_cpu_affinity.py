"""Threads that compute and threads that speak: where each runs, and how long it waits for a core."""

import json
import os
import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes, json, os, threading
from outrider.process import cpu_affinity as place

def now():
    found = place._Attributes()
    number = {"x86_64": 315, "aarch64": 275}[os.uname().machine]
    ctypes.CDLL(None).syscall(number, 0, ctypes.byref(found), ctypes.sizeof(found), 0)
    return [sorted(os.sched_getaffinity(0)), found.runtime, found.nice]

def in_thread(work=lambda: None):
    told = []
    thread = threading.Thread(target=lambda: (work(), told.append(now())))
    thread.start()
    thread.join()
    return told[0]

cores = sorted(os.sched_getaffinity(0))
os.nice(3)
os.sched_setaffinity(0, cores[-1:])
before = now()
place.speak_from(cores)
speaking, follower = now(), in_thread()
computing = in_thread(lambda: place.compute_on(cores[-1:]))
print(json.dumps([cores, before, speaking, follower, computing, now()]))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinities")
def test_threads_that_speak_are_everywhere_and_threads_that_compute_stay():
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    cores, before, speaking, follower, computing, after = json.loads(result.stdout)
    assert before[0] == computing[0] == cores[-1:]
    assert speaking == follower == after
    assert speaking[0] == cores
    assert {facts[2] for facts in (before, speaking, follower, computing)} == {3}, "niceness stays"
    if before[1]:  # the system tells slices
        assert speaking[1] == 100_000
        assert computing[1] > speaking[1]
