"""Packed weights in a file, so that a later start reads what it would otherwise quantize again.

While a model is built inside `cached`, its quantized weights, and arrays computed with them, are taken from the file in
the order in which they are made; what is taken is not packed. What the file does not have, or has damaged, is packed as
without a file. Weights in the checkpoint's own format are not in the file: packing them is copying them.

A file is read into the kernels' memory, not mapped: that memory is on huge pages, without which steps are slower.

    header   JSON in one line: for each part its name, its bytes and their SHA-256
    parts    one behind another

A file is written if packing took long. Its name says of which weights, formats and kernels it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

from outrider.checkpoints.conversion import cache_folder

log = logging.getLogger(__name__)

MIN_SECONDS = 0.3
"""Time that packing takes from which it is worth a file."""

_MOST_FILES, _MOST_BYTES = 8, 32 << 30
_MOST_HEADER = 1 << 24  # bytes

Part = tuple[int, int]
"""Address and size of memory, in bytes."""


class Restorable(Protocol):
    """What a file may hold. restored: its memory was read from the file, so that it is not to be computed."""

    restored: bool


class PackedFile:
    """The parts of one model's packed weights, read or written in their order.

    seconds: that were spent on computing parts
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds = 0.0
        self._file, self._entries = _opened(path)
        self._next = 0
        self._parts: list[tuple[str, Part]] = []
        self._owners: list[Restorable] = []

    def take(self, owner: Restorable, name: str, *parts: Part) -> None:
        """Fill memory from the file, if the file has it: then the owner is restored. name: of what it is."""
        self._owners.append(owner)
        present = [part for part in parts if part[1]]
        self._parts += [(name, part) for part in present]
        taken = [self._take(name, part) for part in present]
        owner.restored = all(taken)

    def _take(self, name: str, part: Part) -> bool:
        address, size = part
        entry = self._entries[self._next] if self._next < len(self._entries) else None
        self._next += 1
        if entry is None or self._file is None or entry[:2] != [name, size]:
            self._give_up()
            return False
        memory = (ctypes.c_char * size).from_address(address)
        if self._file.readinto(memory) != size or hashlib.sha256(memory).hexdigest() != entry[2]:
            log.warning("%s is damaged, so weights are packed again", self.path)
            ctypes.memset(address, 0, size)  # padding must be finite
            self.path.unlink(missing_ok=True)
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        """Take nothing more from the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._entries = None, []

    def finish(self) -> None:
        """All parts are made. Write them, unless they were read, or took too little time."""
        complete = self._file is not None and self._next == len(self._entries)
        self._give_up()
        for owner in self._owners:
            owner.restored = False  # new weights are packed
        if complete:
            os.utime(self.path)  # files that are used stay
        elif self.seconds >= MIN_SECONDS:
            try:
                self._write()
            except OSError as error:
                log.warning("packed weights are not kept for the next start: %s", error)

    def _write(self) -> None:
        folder, size = self.path.parent, sum(part[1] for _, part in self._parts)
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder, size)
        if shutil.disk_usage(folder).free < 2 * size:
            log.info("packed weights are not kept for the next start: %s has too little room", folder)
            return
        memories = [(ctypes.c_char * part[1]).from_address(part[0]) for _, part in self._parts]
        with ThreadPoolExecutor() as threads:
            digests = threads.map(lambda memory: hashlib.sha256(memory).hexdigest(), memories)
            entries = [[name, part[1], digest] for (name, part), digest in zip(self._parts, digests, strict=True)]
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        try:
            with partial.open("wb") as file:
                file.write(json.dumps(entries).encode() + b"\n")
                for memory in memories:
                    file.write(memory)
            partial.replace(self.path)  # not flushed to the disk first: a torn file is found by its checksums
        finally:
            partial.unlink(missing_ok=True)
        log.info("kept %.0f MB of packed weights for the next start, in %s", size / 1e6, self.path)


_active: ContextVar[PackedFile | None] = ContextVar("packed_file", default=None)


def active() -> PackedFile | None:
    """The file of the model that is being built; None for none."""
    return _active.get()


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """The work inside computes parts, which takes time."""
    began = time.perf_counter()
    yield
    if (file := active()) is not None:
        file.seconds += time.perf_counter() - began


@contextlib.contextmanager
def cached(facts: dict[str, Any] | None) -> Iterator[None]:
    """A model that is built inside takes its packed weights from a file, or writes one.

    facts: all that its packed weights depend on; None for no file
    """
    if facts is None:
        yield
        return
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    file = PackedFile(cache_folder() / "packed" / f"{key[:32]}.weights")
    token = _active.set(file)
    try:
        yield
    finally:
        _active.reset(token)
    file.finish()


def _opened(path: Path) -> tuple[BufferedReader | None, list[list[Any]]]:
    """The file behind its header, and the header's entries; none where there is no such file."""
    try:
        file = path.open("rb")
    except OSError:
        return None, []
    try:
        entries = json.loads(file.readline(_MOST_HEADER))
        if isinstance(entries, list) and all(isinstance(one, list) and len(one) == 3 for one in entries):
            return file, entries
    except (OSError, ValueError):
        pass
    log.warning("%s is damaged, so weights are packed again", path)
    file.close()
    return None, []


def _prune(folder: Path, more: int) -> None:
    """Remove the files that were not used for longest, so that another one of `more` bytes keeps the limits."""
    files = sorted(folder.glob("*.weights"), key=lambda file: file.stat().st_mtime, reverse=True)
    total = more
    for number, file in enumerate(files, 2):
        total += file.stat().st_size
        if number > _MOST_FILES or total > _MOST_BYTES:
            file.unlink(missing_ok=True)
    for partial in folder.glob("*.part"):  # of processes that were killed
        if time.time() - partial.stat().st_mtime > 3600:
            partial.unlink(missing_ok=True)
