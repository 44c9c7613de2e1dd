"""Imports of large libraries, which make hundreds of thousands of objects that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected_imports() -> Iterator[None]:
    """Spare Python's collector what is imported: looking through it again and again took a tenth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
