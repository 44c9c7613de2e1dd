"""CPU cores for processes without an accelerator, which would slow one another down on the same ones.

Ray counts CPUs, but does not bind processes to them. Each actor takes cores of its machine by locking a file for each;
the kernel releases the locks when the actor ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from outrider.errors import ConfigError


class CoreLocks:
    """The cores that this process has taken. Keep it for as long as they are in use.

    folder: of the files; the same for all processes of a machine and user
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"outrider-cores-{os.getuid()}"
        self._files: dict[int, int] = {}  # descriptors by core

    def take(self, count: int) -> list[int]:
        """The numbers of `count` cores that no other process has taken. Empty, and none taken, if there are fewer."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.is_symlink() or self._folder.stat().st_uid != os.getuid():
            raise ConfigError(f"{self._folder} belongs to another user; remove it, or set TMPDIR to another folder")
        for core in sorted(os.sched_getaffinity(0)):
            if len(self._files) == count:
                break
            if core in self._files:
                continue
            file = os.open(self._folder / str(core), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._files[core] = file
            except BlockingIOError:
                os.close(file)
        if len(self._files) < count:
            self.release()
        return sorted(self._files)

    def release(self) -> None:
        """Give all cores back."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
