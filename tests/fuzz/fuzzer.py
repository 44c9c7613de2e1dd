"""`python -m tests.fuzz.fuzzer TARGET FLAGS`: one fuzzer, with libFuzzer's flags. It ends this process."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

from tests.fuzz.targets import TARGETS


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
    atheris.Setup([target, *flags], module.fuzz)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
