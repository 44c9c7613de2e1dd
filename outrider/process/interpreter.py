"""How processes of ours start others."""

from __future__ import annotations

import os
import sys


def python(*arguments: str) -> list[str]:
    """A command for this process's Python, such as `-m` and a module.

    Modules are those that are installed, whatever lies in the folder where the user is; unless this process was itself
    started from a checkout there, by `python -m`.
    """
    from_here = sys.path[:1] in ([""], [os.getcwd()])
    return [sys.executable, *([] if from_here else ["-P"]), *arguments]
