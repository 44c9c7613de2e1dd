"""Handling of a full disk: the error names the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from outrider.checkpoints.disk import is_full
from outrider.errors import EngineFault


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
