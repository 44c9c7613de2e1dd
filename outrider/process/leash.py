"""Runs a command that the kernel kills when its parent dies. Used as a script: `python leash.py PARENT_PID COMMAND...`.

The request is made in the child itself, after its own start: a function between fork and exec would run with the
parent's threads missing, and gRPC does not survive that.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def leashed(command: Sequence[str]) -> list[str]:
    """The command, on the leash of this process. It is killed, too, when the thread ends that starts it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    """Become `command`. The parent's death is noticed even if it came before the request. Exits with 1 if it cannot."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            sys.exit(f"error: {command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
