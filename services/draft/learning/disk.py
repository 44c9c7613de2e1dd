"""What a full disk means for a training: what is whole stays, and the user is told what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from outrider.errors import EngineFault

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def told_when_full(folders: str) -> Iterator[None]:
    """Raise EngineFault with a word of what to do where the disk of some folders is full. folders: in words."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not is_full(error):
            raise
        raise EngineFault(
            f"there is no room left on the disk of {folders}; make room and start again with the same flags: answers "
            "and the last checkpoint are kept, and what was lost is done again"
        ) from None


def write_whole(path: Path, text: str) -> None:
    """Write a small file, in one piece or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def is_full(error: Exception) -> bool:
    """True if an error of writing says that a disk, or what a user may have of it, is full."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(f"os error {number}" in str(error) for number in _FULL)  # safetensors tells it in words alone
