"""Files that survive a crash and a full disk: written beside their place, flushed, and renamed when complete."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
FULL = "No space left on device"
"""The system's text for a full disk, as compilers and libraries repeat it."""


def is_full(error: BaseException) -> bool:
    """True if a write error reports a full disk or an exceeded quota."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    # safetensors reports it in its message alone; the hub's library wraps it.
    texts = [str(one) for one in (error, error.__cause__, error.__context__) if one is not None]
    return any(f"os error {number}" in text for number in _FULL for text in texts) or any(FULL in t for t in texts)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush all files of a folder, and their names."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def put_in_place(part: Path, path: Path) -> None:
    """Rename a complete file to its place, so that a crash leaves the old file or the new one."""
    sync(part)
    part.replace(path)
    sync(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        put_in_place(part, path)
    finally:
        part.unlink(missing_ok=True)
