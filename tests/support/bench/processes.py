"""Checks that processes have ended."""

import os
import time


def has_ended(pid):
    """True if a process does not exist or is a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


def wait_ended(pids, seconds):
    """Wait until all processes have ended; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not all(map(has_ended, pids)):
        assert time.monotonic() < deadline, "a child process outlived its benchmark"
        time.sleep(0.01)
