"""Generated answers on disk: tokens and hidden states of records, appended, and read through memory maps.

    about.json       the target and the settings of the requests; answers to others are not mixed with them
    records.bin      a fixed-size entry a record, in the order of writing
    tokens.bin       uint32
    rows-0000.bin    the bytes of hidden states, row after row; a new file begins beyond a size
    lock             held by the process that writes

A record is valid if its entry is complete; the entry is written last. The next run truncates incomplete data of an
interrupted one. It also drops records whose tokens or rows are missing, after a full disk or a crash of the machine,
and all records behind them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints.disk import write_atomically
from outrider.errors import ConfigError

log = logging.getLogger(__name__)

_FILE_BYTES = 1 << 30
_TAKEN = -1  # instead of a lock's descriptor
_ENTRY = np.dtype(
    [
        ("job", "<u8"), ("seed", "<u8"), ("token_start", "<u8"), ("row_start", "<u8"), ("file", "<u4"),
        ("tokens", "<u4"), ("rows", "<u4"), ("prompt", "<u4"), ("first", "<u4"),
        ("held_out", "<u4"), ("temperature", "<f4"), ("unused", "<u4"),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """A sequence that the target generated. Row j of `rows` is its state at token j.

    tokens: [n] uint32; rows: [m, row bytes] uint8, m < n; prompt: tokens of the prompt; first: index of the first token
    to learn
    """

    tokens: NDArray[np.uint32]
    rows: NDArray[np.uint8]
    prompt: int
    first: int
    temperature: float
    seed: int
    held_out: bool = False

    @property
    def learnt(self) -> int:
        """Number of tokens to learn."""
        return len(self.tokens) - self.first


class Store:
    """The records of a folder. One process writes at a time, until it closes the store; any may read."""

    def __init__(self, folder: Path, about: dict[str, Any], row_bytes: int, enough: int | None = None) -> None:
        """about: settings that must be the same for all records, as JSON values. enough: tokens that suffice to read.

        Raises ConfigError if settings differ, or while another process writes and there are not enough tokens.
        """
        self.folder, self.row_bytes = folder, row_bytes
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder)
        self._unlock = None if lock in (None, _TAKEN) else weakref.finalize(self, os.close, lock)
        _check(folder / "about.json", about | {"row_bytes": row_bytes})
        self._entries = self._present() if lock == _TAKEN else self._recover()
        self.jobs = set(self._entries["job"].tolist())
        self.token_count = int((self._entries["tokens"] - self._entries["first"]).sum())
        if lock == _TAKEN and (enough is None or self.token_count < enough):
            raise ConfigError(
                f"another training writes answers into {folder}; wait until it is done, or name another "
                "folder with --answers"
            )

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> NDArray[Any]:
        """The entries, a structured array with the fields of a record."""
        return self._entries

    @property
    def bytes(self) -> int:
        """Size of all hidden states."""
        return int(self._entries["rows"].sum()) * self.row_bytes

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _rows_file(self, number: int) -> Path:
        return self.folder / f"rows-{number:04}.bin"

    def _present(self) -> NDArray[Any]:
        """The entries that are complete."""
        path = self._path("records.bin")
        raw = path.read_bytes() if path.is_file() else b""
        return np.frombuffer(raw[: len(raw) // _ENTRY.itemsize * _ENTRY.itemsize], _ENTRY)

    def _recover(self) -> NDArray[Any]:
        """The complete entries; files are truncated behind their data."""
        path, entries = self._path("records.bin"), self._present()
        entries = entries[: self._whole(entries)].copy()
        ends = {0: 0}
        for entry in entries[-1:]:
            ends = {int(entry["file"]): int(entry["row_start"] + entry["rows"]) * self.row_bytes}
        tokens = int((entries["token_start"] + entries["tokens"]).max(initial=0))
        _cut(path, entries.nbytes)
        _cut(self._path("tokens.bin"), 4 * tokens)
        for number, end in ends.items():
            _cut(self._rows_file(number), end)
            for later in self.folder.glob("rows-*.bin"):  # of records without an entry
                if later.name > self._rows_file(number).name:
                    later.unlink()
        return entries

    def _whole(self, entries: NDArray[Any]) -> int:
        """Number of leading entries whose tokens and rows are in the files."""
        there = 4 * (entries["token_start"] + entries["tokens"]) <= _size(self._path("tokens.bin"))
        ends = (entries["row_start"] + entries["rows"]) * self.row_bytes
        for number in np.unique(entries["file"]).tolist():
            there &= (entries["file"] != number) | (ends <= _size(self._rows_file(number)))
        whole = len(entries) if there.all() else int(there.argmin())
        if whole < len(entries):
            log.warning("%d answers in %s are incomplete; they are generated again", len(entries) - whole, self.folder)
        return whole

    def close(self) -> None:
        """Release the lock, so that other processes may write. The records remain readable."""
        if self._unlock is not None:
            self._unlock()

    def add(self, job: int, records: Sequence[Record]) -> None:
        """Append the records of a job, all or none. The store must not be closed."""
        last = self._entries[-1] if len(self._entries) else None
        number = int(last["file"]) if last is not None else 0
        row = int(last["row_start"] + last["rows"]) if last is not None else 0
        token = int(last["token_start"] + last["tokens"]) if last is not None else 0
        if row * self.row_bytes > _FILE_BYTES:
            number, row = number + 1, 0
        ends = {self._rows_file(number): row * self.row_bytes, self._path("tokens.bin"): 4 * token}
        ends[self._path("records.bin")] = self._entries.nbytes
        try:
            entries = self._append(job, records, number, row, token)
        except OSError:  # for example of a full disk: remove what was written
            for path, end in ends.items():
                _cut(path, end)
            raise
        self._entries = np.concatenate([self._entries, entries])
        self.jobs.add(job)
        self.token_count += sum(record.learnt for record in records)

    def _append(self, job: int, records: Sequence[Record], number: int, row: int, token: int) -> NDArray[Any]:
        """Write records. number: of the file of rows; row, token: where they begin. Returns their entries."""
        entries = np.zeros(len(records), _ENTRY)
        with self._rows_file(number).open("ab") as rows, self._path("tokens.bin").open("ab") as tokens:
            for entry, record in zip(entries, records, strict=True):
                assert record.rows.shape[1] == self.row_bytes
                entry["job"], entry["seed"], entry["file"] = job, record.seed, number
                entry["token_start"], entry["tokens"] = token, len(record.tokens)
                entry["row_start"], entry["rows"] = row, len(record.rows)
                entry["prompt"], entry["first"], entry["held_out"] = record.prompt, record.first, record.held_out
                entry["temperature"] = record.temperature
                rows.write(np.ascontiguousarray(record.rows).tobytes())
                tokens.write(record.tokens.astype("<u4").tobytes())
                token, row = token + len(record.tokens), row + len(record.rows)
        with self._path("records.bin").open("ab") as out:
            out.write(entries.tobytes())
        return entries

    def tokens(self, index: int) -> NDArray[np.uint32]:
        """The tokens of a record."""
        entry = self._entries[index]
        return np.fromfile(self._path("tokens.bin"), "<u4", int(entry["tokens"]), offset=4 * int(entry["token_start"]))

    def read(self, count: int | None = None) -> Reader:
        """The present records. count: only that many first ones."""
        return Reader(self, count)


class Reader:
    """The records of a store through memory maps."""

    def __init__(self, store: Store, count: int | None = None) -> None:
        """count: as of `Store.read`."""
        self.entries, self.row_bytes = store.entries[:count], store.row_bytes
        self._tokens = _mapped(store.folder / "tokens.bin", np.dtype("<u4"))
        files = np.unique(self.entries["file"]).tolist()
        self._rows = {
            number: _mapped(store._rows_file(number), np.dtype(np.uint8)).reshape(-1, store.row_bytes)
            for number in files
        }

    def __len__(self) -> int:
        return len(self.entries)

    def tokens(self, index: int) -> NDArray[np.uint32]:
        """The tokens of a record."""
        entry = self.entries[index]
        return self._tokens[int(entry["token_start"]) : int(entry["token_start"]) + int(entry["tokens"])]

    def rows(self, index: int) -> NDArray[np.uint8]:
        """The hidden states of a record, [m, row bytes]."""
        entry = self.entries[index]
        return self._rows[int(entry["file"])][int(entry["row_start"]) : int(entry["row_start"]) + int(entry["rows"])]

    def record(self, index: int) -> Record:
        """All of a record."""
        entry = self.entries[index]
        return Record(
            self.tokens(index), self.rows(index), int(entry["prompt"]), int(entry["first"]),
            float(entry["temperature"]), int(entry["seed"]), bool(entry["held_out"]),
        )  # fmt: skip

    def choose(self, *, held_out: bool) -> list[int]:
        """Indices of the records that are kept for evaluation, or of the others."""
        return np.flatnonzero(self.entries["held_out"].astype(bool) == held_out).tolist()

    def learnt(self, indices: Iterable[int]) -> Iterable[NDArray[np.uint32]]:
        """The tokens to learn of the given records."""
        for index in indices:
            yield self.tokens(index)[int(self.entries["first"][index]) :]


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.memmap(path, dtype, "r") if _size(path) else np.zeros(0, dtype)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _cut(path: Path, size: int) -> None:
    if _size(path) > size:
        with path.open("r+b") as file:
            file.truncate(size)


def _locked(folder: Path) -> int | None:
    """Descriptor of a folder's lock, held until it is closed; None for a read-only folder, _TAKEN if another has it.

    A file system without locks is used unlocked, with a warning.
    """
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            return None
        raise
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return _TAKEN
    except OSError as error:
        log.warning("%s cannot be locked (%s); run no other training that writes there", folder, error.strerror)
    return lock


def _check(path: Path, about: dict[str, Any]) -> None:
    """Raise ConfigError if the folder holds answers to other settings."""
    about = json.loads(json.dumps(about))
    if not path.is_file():
        write_atomically(path, json.dumps(about, indent=1))  # an incomplete file would make the folder unusable
        return
    found = json.loads(path.read_text())
    wrong = [
        f"{name} was {found.get(name)!r}, not {value!r}" for name, value in about.items() if found.get(name) != value
    ]
    if wrong:
        raise ConfigError(f"{path.parent} holds answers to other settings: {'; '.join(wrong)}; name "
                          "another folder with --answers")  # fmt: skip
