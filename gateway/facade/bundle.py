"""The tokenizer's files as an archive whose bytes depend on the files alone."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping

_PART_BYTES = 64 << 10
_NO_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest date of the format


def bundle(files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """A zip archive of files, and its SHA-256, hexadecimal."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, _NO_DATE), files[name], zipfile.ZIP_DEFLATED)
    return made.getvalue(), hashlib.sha256(made.getvalue()).hexdigest()


def chunks(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Parts of an archive, each with True if it is the last."""
    for start in range(0, len(data), _PART_BYTES):
        yield data[start : start + _PART_BYTES], start + _PART_BYTES >= len(data)
