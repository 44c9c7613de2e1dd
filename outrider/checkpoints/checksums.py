"""Checksums of a folder's files, in a file beside them: damage is found before it changes a text."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from outrider.checkpoints.disk import write_atomically

CHECKSUMS = "checksums.json"
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of a file


def sample(digest: Any, stream: BinaryIO, begin: int, end: int) -> None:
    """Add evenly spaced samples of a part of a file to a hash."""
    for number in range(_SAMPLES):
        stream.seek(begin + (end - begin) * number // _SAMPLES)
        digest.update(stream.read(_SAMPLE_BYTES))


def write_checksums(folder: Path) -> None:
    """Write the sizes and SHA-256 of all files below a folder into the folder."""
    files = _files(folder)
    facts = {file: {"bytes": (folder / file).stat().st_size, "sha256": digest}
             for file, digest in zip(files, _digests(folder, files), strict=True)}  # fmt: skip
    write_atomically(folder / CHECKSUMS, json.dumps(facts, indent=1) + "\n")


def damage(folder: Path, *, whole: bool) -> str | None:
    """What is wrong with a folder's files, as a clause; None if nothing is, or if the folder has no checksums.

    whole: read all bytes; otherwise only sizes are compared
    """
    try:
        facts: dict[str, Any] = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        expected = {file: (int(fact["bytes"]), str(fact["sha256"])) for file, fact in facts.items()}
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{CHECKSUMS} cannot be read"
    for file, (size, _) in expected.items():
        if not (folder / file).is_file():
            return f"{file} is missing"
        if (found := (folder / file).stat().st_size) != size:
            return f"{file} has {found} bytes instead of {size}"
    digests = _digests(folder, list(expected)) if whole else []
    changed = (file for file, digest in zip(expected, digests, strict=False) if digest != expected[file][1])
    return next((f"{file} has other bytes than when it was written" for file in changed), None)


def _files(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != CHECKSUMS)


def _digests(folder: Path, files: list[str]) -> list[str]:
    """The digests of files, in several threads, because hashing releases the interpreter lock."""

    def digest(file: str) -> str:
        with (folder / file).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor() as threads:
        return list(threads.map(digest, files))
