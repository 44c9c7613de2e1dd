"""C++ of ours, compiled once an environment and source, for whichever service has some.

A library lands beside the virtual environment's own libraries, or in the cache folder if that cannot be written.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from outrider.checkpoints import checkpoint

_COMPILERS = ("g++", "clang++", "c++")
_LONGEST = 300.0  # seconds

Signatures = Mapping[str, tuple[type | None, tuple[type, ...]]]
"""Result and arguments of C functions, by name."""


class Unavailable(Exception):
    """Why a library cannot be had on this machine, and what would help."""


@dataclass(frozen=True)
class Library:
    """A folder of C++ files that become one library.

    name: of the library's file, without its key. includes: folders of headers that it shares with others. check: raises
    Unavailable where the machine could not run it
    """

    name: str
    folder: Path
    flags: tuple[str, ...]
    includes: tuple[Path, ...] = ()
    check: Callable[[], None] | None = None

    def loaded(self, prefix: str = "", signatures: Signatures = MappingProxyType({})) -> ctypes.CDLL:
        """The library, compiled if it is not there. prefix: of its functions' names. Raises Unavailable."""
        path = self.compiled()
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:  # such as one that another system has left in a shared folder
            raise Unavailable(f"{path} cannot be loaded: {error}; delete it") from None
        for name, (result, arguments) in signatures.items():
            function = getattr(library, prefix + name)
            function.restype, function.argtypes = result, arguments
        return library

    def compiled(self) -> Path:
        """The compiled library, made if it is not there. Raises Unavailable."""
        if self.check is not None:
            self.check()
        name = f"{self.name}-{self._key()}.so"
        places = [Path(sys.prefix) / "lib" / "outrider", checkpoint.cache_folder() / "kernels"]
        for place in places:
            if os.path.isfile(place / name):  # which takes a folder that nobody may look into for an empty one
                return place / name
        compiler = next((path for path in map(shutil.which, _COMPILERS) if path), None)
        if compiler is None:
            raise Unavailable("there is no C++ compiler (g++ or clang++); install one")
        for place in places:
            try:
                place.mkdir(parents=True, exist_ok=True)
                return self.compile(compiler, place / name)
            except OSError:
                continue  # a folder that cannot be written; the next one may be
        raise Unavailable(f"neither {places[0]} nor {places[1]} can be written")

    def _key(self) -> str:
        digest = hashlib.sha256(" ".join(self.flags).encode())
        for folder in (self.folder, *self.includes):
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def compile(self, compiler: str, path: Path) -> Path:
        """Compile to a file, which appears at once and whole. Raises Unavailable."""
        sources = sorted(self.folder.glob("*.cpp"))
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = [Path(folder) / f"{source.stem}.o" for source in sources]
            made = Path(folder) / path.name
            list(threads.map(lambda source, to: self._run(compiler, "-c", source, "-o", to), sources, objects))
            self._run(compiler, "-shared", *objects, "-o", made)
            os.replace(made, path)
        return path

    def _run(self, compiler: str, *arguments: str | Path) -> None:
        """Call the compiler. Raises Unavailable."""
        command = [compiler, *self.flags, *(f"-I{folder}" for folder in self.includes), *map(str, arguments)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST, check=False)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{compiler} did not compile {self.name} in {_LONGEST:.0f} s") from None
        if result.returncode:
            first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[:200])
            raise Unavailable(f"{compiler} could not compile {self.name}: {first}")


def freed_with(owner: object, free: Callable[[int], None], handle: int) -> None:
    """Free what a library holds once its owner goes. Not at the interpreter's end: threads may be at work with it."""
    weakref.finalize(owner, free, handle).atexit = False


def report(library: Library, what: str, instead: str) -> None:
    """Compile a library, and print what came of it. instead: what serves where it cannot be had."""
    try:
        sys.stdout.write(f"{what}: compiled, {library.compiled()}\n")
    except Unavailable as reason:
        sys.stdout.write(f"{what}: not compiled; {reason}. {instead} serves instead, more slowly.\n")
