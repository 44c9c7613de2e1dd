"""Handling of a full disk: files are written whole or not at all, and the error names the remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from outrider.errors import EngineFault

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def reporting_full_disk(folders: str) -> Iterator[None]:
    """Turn errors of a full disk into an EngineFault that names the remedy. folders: their description."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not is_full(error):
            raise
        raise EngineFault(
            f"there is no room left on the disk of {folders}; free some and start again with the same flags: answers "
            "and the last checkpoint are kept, and lost work is repeated"
        ) from None


def write_atomically(path: Path, text: str) -> None:
    """Write a small file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def is_full(error: Exception) -> bool:
    """True if a write error reports a full disk or an exceeded quota."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(f"os error {number}" in str(error) for number in _FULL)  # safetensors reports it in its message alone
