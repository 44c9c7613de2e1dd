"""Runs a command that the kernel kills when its parent dies: `python parent_death.py PARENT_PID COMMAND...`.

The child itself asks the kernel for the signal, after its start: a function between fork and exec would run without the
parent's threads, which gRPC does not survive.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tied_to_parent(command: Sequence[str]) -> list[str]:
    """The command, wrapped so that it dies with this process, and with the thread that starts it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    """Become `command`, unless the parent is dead already. Exits with 1 if the command cannot be run."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            sys.exit(f"error: {command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
