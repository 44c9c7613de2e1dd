"""Packed weights in a file, which later starts map instead of packing them again.

While a model is built inside `cached`, its packed weights, and arrays computed with them, are taken from the file in
the order in which they are made. What the file does not have, or has damaged, is packed as without a file. Weights in
plain formats are not in the file: packing them is copying them.

The file is mapped, privately: processes of one machine share its pages, and a page that new weights change becomes the
process's own. It is compared with its checksums first, by several threads.

    header   JSON in one line, padded to whole pages: for each part its name, its bytes and their checksum
    parts    one behind another, each padded to whole pages

A file is written if packing took long; not at once, but when `write_pending` is called, because the start has not the
time for it. Its name says of which weights, formats and kernels it is. It is never changed, so that a process may go on
with one that another process has replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import mmap
import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from outrider.checkpoints.conversion import cache_folder
from services.target.kernels.cpu import library

log = logging.getLogger(__name__)

MIN_SECONDS = 0.1
"""Time that packing takes from which it is worth a file."""

_MOST_FILES, _MOST_BYTES = 8, 32 << 30
_MOST_HEADER = 1 << 24  # bytes
_PAGE = 4096
_NICENESS = 10  # of the thread that writes

Part = tuple[int, int]
"""Address and size of memory, in bytes."""


class Restorable(Protocol):
    """What a file may hold. restored: the file has it, so that it is not to be computed."""

    restored: bool

    def memory(self) -> Sequence[Part]:
        """Its parts; they have addresses once it is computed."""
        ...


class PackedFile:
    """The parts of one model's packed weights, mapped in their order, or written.

    mapped: the whole file, which lives as long as its users. taken: bytes of the parts that lie in it
    seconds: that were spent on computing parts
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds, self.taken = 0.0, 0
        self._entries: list[list[Any]] = []
        self.mapped: mmap.mmap | None = None
        self._checks: list[Future[bool]] = []
        self._starts: list[int] = []
        self._next = 0
        self._owners: list[tuple[str, weakref.ref[Restorable]]] = []
        self._writing = threading.Lock()
        self._dropped = False
        self._open()

    def take(self, owner: Restorable, name: str) -> list[int] | None:
        """The addresses of an owner's parts in the file; None if it does not have them. name: of what it is."""
        self._owners.append((name, weakref.ref(owner)))
        sizes = [size for _, size in owner.memory()]
        found = [self._take(name, size) if size else 0 for size in sizes]
        return None if None in found else [address for address in found if address is not None]

    def _take(self, name: str, size: int) -> int | None:
        number, self._next = self._next, self._next + 1
        if self.mapped is None or number >= len(self._entries) or self._entries[number][:2] != [name, size]:
            self._give_up()
            return None
        if not self._checks[number].result():
            self._damaged()
            return None
        self.taken += size
        return ctypes.addressof(ctypes.c_char.from_buffer(self.mapped, self._starts[number]))

    def _damaged(self) -> None:
        log.warning("%s is damaged, so weights are packed again", self.path)
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._give_up()

    def _give_up(self) -> None:
        """Take nothing more from the file."""
        for check in self._checks:
            check.cancel()
        self.mapped, self._checks, self._entries = None, [], []

    def _open(self) -> None:
        """Map the file, if there is one, and begin to compare it with its checksums."""
        try:
            file = self.path.open("rb")
        except OSError:  # there is none, or the cache cannot be read
            return
        try:
            with file:
                header = file.readline(_MOST_HEADER)
                entries = json.loads(header)
                starts = _places(len(header), [entry[1] for entry in entries])
                if len(header) % _PAGE or starts[-1] != os.fstat(file.fileno()).st_size:
                    raise ValueError("it has another size")
                # Private, so that new weights may be written; without them all pages stay those of the file.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError, TypeError, LookupError):
            self._damaged()
            return
        self.mapped, self._entries, self._starts = mapped, entries, starts
        threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._checks = [
            threads.submit(_intact, mapped, start, entry[1], entry[2])
            for start, entry in zip(starts[:-1], entries, strict=True)
        ]
        threads.shutdown(wait=False)

    def finish(self) -> None:
        """All parts are made. Those that were computed, and took long enough, are pending from now on."""
        complete = self.mapped is not None and self._next == len(self._entries)
        self._give_up()
        for _, reference in self._owners:
            if (owner := reference()) is not None:
                owner.restored = False  # new weights are packed
        if complete:
            os.utime(self.path)  # files that are used stay
        elif self.seconds >= MIN_SECONDS:
            _pending.append(self)

    def write(self) -> None:
        """Write the parts, unless their weights were replaced or freed."""
        with self._writing:
            if self._dropped or self.path.exists():  # another process has written it
                return
            try:
                self._write()
            except OSError as error:
                log.warning("packed weights are not kept for the next start: %s", error)

    def drop(self) -> None:
        """The weights are about to be replaced: what is not written yet will not be."""
        self._dropped = True
        with self._writing:  # a part may be on its way to the disk
            pass

    def _write(self) -> None:
        owners = [(name, reference()) for name, reference in self._owners]
        parts = [
            (name, part) for name, owner in owners if owner is not None for part in owner.memory() if part[1]
        ]  # fmt: skip
        if any(owner is None for _, owner in owners):
            return
        folder, size = self.path.parent, sum(part[1] for _, part in parts)
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder, size)
        if shutil.disk_usage(folder).free < 2 * size:
            log.info("packed weights are not kept for the next start: %s has too little room", folder)
            return
        checksum = library.load().outrider_checksum
        header = _padded(json.dumps([[name, part[1], checksum(*part)] for name, part in parts]).encode())
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        try:
            with partial.open("wb") as file:
                file.write(header)
                for _, (address, length) in parts:
                    if self._dropped:
                        return
                    file.write((ctypes.c_char * length).from_address(address))
                    file.write(bytes(-length % _PAGE))
            if not self._dropped:
                partial.replace(self.path)  # not flushed to the disk first: a torn file is found by its checksums
        finally:
            partial.unlink(missing_ok=True)
        log.info("kept %.0f MB of packed weights for the next start, in %s", size / 1e6, self.path)


_pending: list[PackedFile] = []  # of models that were built
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
def cached(facts: dict[str, Any] | None) -> Iterator[PackedFile | None]:
    """A model that is built inside takes its packed weights from a file. Without one, they are to be written.

    facts: all that its packed weights depend on; None for no file
    """
    if facts is None:
        yield None
        return
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    file = PackedFile(cache_folder() / "packed" / f"{key[:32]}.weights")
    token = _active.set(file)
    try:
        yield file
    finally:
        _active.reset(token)
    file.finish()


def write_pending() -> None:
    """Write the packed weights of the models that were built, for the next start. At a low priority, in any thread."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    for file in list(_pending):
        file.write()
        if file in _pending:
            _pending.remove(file)


def drop_pending() -> None:
    """Weights are about to be replaced: what is pending is not written, or is written before this returns."""
    for file in _pending:
        file.drop()


def _places(first: int, sizes: Sequence[int]) -> list[int]:
    """Where parts begin that lie one behind another, and where the last one ends with its padding."""
    places = [first]
    for size in sizes:
        places.append(places[-1] + size + -size % _PAGE)
    return places


def _padded(header: bytes) -> bytes:
    """A line of whole pages."""
    return header + b" " * (-(len(header) + 1) % _PAGE) + b"\n"


def _intact(mapped: mmap.mmap, start: int, size: int, expected: int) -> bool:
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped, start))
    return int(library.load().outrider_checksum(address, size)) == expected


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
