"""`python -m services.target.kernels.cpu.build`: compiles the kernels, once an environment and source.

The library lands beside the virtual environment's own libraries, or in the cache folder if that cannot be written.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from outrider import checkpoint

_SOURCES = Path(__file__).parent / "csrc"
# What the kernels are written in, by the names of /proc/cpuinfo.
_INSTRUCTIONS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno",
    "-fno-tree-slp-vectorize", "-mtune=native", "-mavx2", "-mfma", "-mf16c",
    *("-m" + name.replace("_", "") for name in _INSTRUCTIONS),
)  # fmt: skip
_COMPILERS = ("g++", "clang++", "c++")
_LONGEST = 300.0  # seconds


class Unavailable(Exception):
    """Why the kernels cannot be had on this machine, and what would help."""


def library() -> Path:
    """The compiled library, made if it is not there. Raises Unavailable, also where the processor could not run it."""
    _check_processor()
    return compiled()


def compiled() -> Path:
    """The compiled library, made if it is not there, for this processor or another. Raises Unavailable."""
    name = f"outrider-kernels-{_key()}.so"
    places = [Path(sys.prefix) / "lib" / "outrider", checkpoint.cache_folder() / "kernels"]
    for place in places:
        if (place / name).is_file():
            return place / name
    compiler = next((path for path in map(shutil.which, _COMPILERS) if path), None)
    if compiler is None:
        raise Unavailable("there is no C++ compiler (g++ or clang++); install one")
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            return _compile(compiler, place / name)
        except OSError:
            continue  # a folder that cannot be written; the next one may be
    raise Unavailable(f"neither {places[0]} nor {places[1]} can be written")


def _check_processor() -> None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        raise Unavailable(f"they are written for Linux, and this is {platform.system()}") from None
    has = set(next((line for line in lines if line.startswith("flags")), "").split())
    if missing := [name for name in _INSTRUCTIONS if name not in has]:
        raise Unavailable(f"this processor lacks {', '.join(missing)}")


def _key() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, path: Path) -> Path:
    sources = sorted(str(source) for source in _SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *_FLAGS, *sources, "-o", str(made)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST, check=False)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{compiler} did not compile them in {_LONGEST:.0f} s") from None
        if result.returncode:
            first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[:200])
            raise Unavailable(f"{compiler} could not compile them: {first}")
        os.replace(made, path)
    return path


if __name__ == "__main__":
    try:
        sys.stdout.write(f"the CPU kernels are compiled: {compiled()}\n")
    except Unavailable as reason:
        sys.stdout.write(f"no CPU kernels: {reason}. PyTorch's own operators serve instead, more slowly.\n")
