"""Command lines of Python child processes."""

from __future__ import annotations

import os
import sys


def python_command(*arguments: str) -> list[str]:
    """A command line for this process's Python interpreter. arguments: such as `-m` and a module.

    The child imports installed modules only, never files in the working directory, unless this process itself was
    started from a checkout in the working directory by `python -m`.
    """
    from_checkout = sys.path[:1] in ([""], [os.getcwd()])
    return [sys.executable, *([] if from_checkout else ["-P"]), *arguments]
