"""`python -m tests.fuzz.fuzzer TARGET FLAGS`: one fuzzer, with libFuzzer's flags. It ends this process."""

from __future__ import annotations

import importlib
import logging
import mmap
import os
import sys
from pathlib import Path

from tests.fuzz.targets import TARGETS

RUNNING = "FUZZ_RUNNING"
"""Environment variable with the file of the present input: its length in 4 bytes, then the input."""
_LARGEST = 1 << 20


def main(target: str, flags: list[str]) -> None:
    """Instrument a target's packages while they are imported, and fuzz it."""
    try:
        import atheris
    except ImportError:
        sys.exit('the fuzzers need atheris; run `make fuzz`, or `pip install "outrider[fuzz]"`')
    with atheris.instrument_imports(include=list(TARGETS[target])):
        module = importlib.import_module(f"tests.fuzz.targets.{target}")
    work = next(Path(flag) for flag in flags if not flag.startswith("-"))
    for number, seed in enumerate(module.seeds()):
        (work / f"seed-{number}").write_bytes(seed)
    logging.disable(logging.CRITICAL)  # a line for each refused input
    running = _Running(Path(os.environ[RUNNING]))

    def one(data: bytes) -> None:
        running.note(data)
        module.fuzz(data)

    atheris.Setup([target, *flags], one)
    atheris.Fuzz()


class _Running:
    """The present input in a file, for when native code ends the process."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(_LARGEST + 4))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), 0)

    def note(self, data: bytes) -> None:
        self._memory[: 4 + len(data)] = len(data).to_bytes(4, "little") + data


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
