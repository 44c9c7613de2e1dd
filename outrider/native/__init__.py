"""Compilation and loading of the services' C++ code, once per environment and source.

A library is stored in the virtual environment, or in the cache folder if the environment cannot be written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from outrider.checkpoints import disk
from outrider.checkpoints.conversion import cache_folder

COMPILERS = ("g++", "clang++", "c++")
_TIMEOUT = 300.0  # seconds of a compiler call
_PARTIAL = ".partial"  # ends the name of a folder in which a library is compiled

Signatures = Mapping[str, tuple[type | None, tuple[type, ...]]]
"""Result and argument types of C functions, by name."""


class Unavailable(Exception):
    """A library cannot be used on this machine; the message has the reason and a remedy."""


@dataclass(frozen=True)
class Library:
    """A folder of C++ files that are compiled into one library. Paths of its own headers start at the folder.

    name: of the library's file, without its key. includes: folders of shared headers. check: raises Unavailable if the
    machine cannot run the library
    """

    name: str
    folder: Path
    flags: tuple[str, ...]
    includes: tuple[Path, ...] = ()
    check: Callable[[], None] | None = None

    def loaded(self, prefix: str = "", signatures: Signatures = MappingProxyType({})) -> ctypes.CDLL:
        """Load the library, and compile it if needed. prefix: of its functions' names. Raises Unavailable."""
        path = self.compiled()
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:  # such as a library of another system in a shared folder
            raise Unavailable(f"{path} cannot be loaded: {error}; delete it") from None
        for name, (result, arguments) in signatures.items():
            function = getattr(library, prefix + name)
            function.restype, function.argtypes = result, arguments
        return library

    def compiled(self) -> Path:
        """The path of the compiled library; compiles it if needed. Raises Unavailable."""
        if (found := self.found()) is not None:
            return found
        name, folders = self._places()
        compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
        if compiler is None:
            raise Unavailable("there is no C++ compiler (g++ or clang++); install one")
        reasons = []
        for folder in folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with _locked(folder / name):  # replicas that start together compile once
                    return self.found() or self.compile(compiler, folder / name)
            except OSError as error:  # the folder cannot be written; try the next one
                reasons.append(f"{folder}: {error.strerror}")
        raise Unavailable(f"compiled code cannot be written ({'; '.join(reasons)}); make one of these folders writable")

    def found(self) -> Path | None:
        """The path of the library if it is compiled already. Raises Unavailable if the machine cannot run it."""
        if self.check is not None:
            self.check()
        name, folders = self._places()
        # isfile: False, not an error, in a folder without read permission. A damaged library is compiled again.
        return next((path for folder in folders if os.path.isfile(path := folder / name) and _intact(path)), None)

    def _places(self) -> tuple[str, list[Path]]:
        """Name of the compiled library, and the folders that may have it."""
        return f"{self.name}-{self._key()}.so", [Path(sys.prefix) / "lib" / "outrider", cache_folder() / "kernels"]

    def _key(self) -> str:
        digest = hashlib.sha256(" ".join(self.flags).encode())
        for folder in (self.folder, *self.includes):
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def compile(self, compiler: str, path: Path) -> Path:
        """Compile to a file, which appears atomically, with its checksum beside it. Raises Unavailable and OSError."""
        sources = sorted(self.folder.rglob("*.cpp"))
        made_in = tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}.", suffix=_PARTIAL)
        with made_in as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = [Path(folder) / f"{source.stem}.o" for source in sources]
            made = Path(folder) / path.name
            list(threads.map(lambda source, to: self._run(compiler, "-c", source, "-o", to), sources, objects))
            self._run(compiler, "-shared", *objects, "-o", made)
            digest = _digest(made)
            disk.put_in_place(made, path)
            disk.write_atomically(_checksum(path), digest + "\n")
        return path

    def _run(self, compiler: str, *arguments: str | Path) -> None:
        """Call the compiler. Raises Unavailable, and OSError for a full disk."""
        folders = (f"-I{folder}" for folder in (self.folder, *self.includes))
        command = [compiler, *self.flags, *folders, *map(str, arguments)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{compiler} did not compile {self.name} in {_TIMEOUT:.0f} s") from None
        if result.returncode:
            if disk.FULL in result.stderr:
                raise OSError(errno.ENOSPC, disk.FULL)
            first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[:200])
            raise Unavailable(f"{compiler} could not compile {self.name}: {first}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a library that is compiled, and remove what compilations that were killed left."""
    with open(f"{path}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in path.parent.glob(f"{path.name}.*{_PARTIAL}"):
            shutil.rmtree(stale, ignore_errors=True)
        yield


def _checksum(path: Path) -> Path:
    """The file with a library's checksum."""
    return path.with_name(path.name + ".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _intact(path: Path) -> bool:
    """False for a library whose bytes are not those that were written: calling it could crash the process."""
    try:
        expected = _checksum(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return True  # compiled by an earlier release
    return _digest(path) == expected


def freed_with(owner: object, free: Callable[[int], None], handle: int) -> None:
    """Free a library's object with its owner, but not at interpreter exit, when threads may still use it."""
    weakref.finalize(owner, free, handle).atexit = False


def report(library: Library, what: str, instead: str) -> None:
    """Compile a library and print the result. instead: its replacement where it is not available."""
    try:
        sys.stdout.write(f"{what}: compiled, {library.compiled()}\n")
    except Unavailable as reason:
        sys.stdout.write(f"{what}: not compiled; {reason}. Using {instead}, which is slower.\n")
