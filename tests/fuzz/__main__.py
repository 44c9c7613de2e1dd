"""Let the fuzzers look for faults.

make fuzz                                       every target, a minute each
make fuzz ARGS="frames bodies --seconds 3600"   some of them, longer
make fuzz ARGS="grammars --keep"                keep a sample of the inputs that covered more, in tests/fuzz/corpus

An input that fails is written to tests/fuzz/corpus/TARGET, so that it stays a test.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tests.fuzz.fuzzer import RUNNING
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
_WORK = Path(".fuzz")  # what the fuzzers collect; a later run goes on with it
_MOST_KEPT, _LARGEST_KEPT = 30, 1500  # inputs of a target in the repository, and bytes of each
_HANG_SECONDS, _MEMORY_MB = 20, 3000  # of one input
_LONGEST = 4096  # bytes of an input

Target = Literal[tuple(TARGETS)]


@dataclass(frozen=True)
class Options:
    """Coverage-guided fuzzers of everything that reads bytes of others."""

    targets: Annotated[tuple[Target, ...], tyro.conf.Positional] = ()
    """Targets. Default: all."""
    seconds: int = 60
    """Duration of each, in seconds."""
    keep: bool = False
    """Keep a sample of the collected inputs in tests/fuzz/corpus."""


def main(options: Options) -> int:
    """Run fuzzers one after the other. Returns 1 if one of them found a fault."""
    failed = 0
    for target in options.targets or TARGETS:
        started = time.monotonic()
        code, executed, covered = _fuzz(target, options.seconds)
        found = "found a fault" if code else "no fault"
        print(f"{target}: {found}; {executed} inputs, {covered} edges, {time.monotonic() - started:.0f} s", flush=True)
        failed += bool(code)
        if options.keep:
            print(f"{target}: keeps {_keep(target)} inputs", flush=True)
    print(f"{len(options.targets or TARGETS) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _fuzz(target: str, seconds: int) -> tuple[int, str, str]:
    """Fuzz one target. Returns libFuzzer's exit code, the number of inputs and of covered edges."""
    work, kept = _WORK / target, CORPUS / target
    work.mkdir(parents=True, exist_ok=True)
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as found:
        flags = [f"-max_total_time={seconds}", f"-artifact_prefix={found}/", f"-timeout={_HANG_SECONDS}"]
        flags += [f"-rss_limit_mb={_MEMORY_MB}", f"-max_len={_LONGEST}", "-print_final_stats=1", str(work), str(kept)]
        running = Path(found) / "running"
        ended, code = _child(target, flags, running)
        content = running.read_bytes() if running.exists() else bytes(4)
        running.unlink(missing_ok=True)
        faults = [file.read_bytes() for file in Path(found).iterdir()]
        if code < 0 and not faults:  # a signal that libFuzzer did not survive
            faults = [content[4 : 4 + int.from_bytes(content[:4], "little")]]
    for content in faults:
        (kept / f"fault-{hashlib.sha1(content).hexdigest()[:10]}").write_bytes(content)
    executed = re.findall(r"stat::number_of_executed_units:\s*(\d+)", ended)
    covered = re.findall(r"\bcov: (\d+)", ended)
    if code or faults:
        print("\n".join([*ended.splitlines()[-40:], f"exit code {code}"]), file=sys.stderr)
    return code or len(faults), (executed or ["?"])[-1], (covered or ["?"])[-1]


def _keep(target: str) -> int:
    """Keep some of the inputs that a fuzzer has collected, each of which covered something new. Returns their number.

    Inputs of faults stay.
    """
    kept = CORPUS / target
    found = {file.read_bytes() for file in (_WORK / target).iterdir() if file.stat().st_size <= _LARGEST_KEPT}
    contents = sorted(found, key=lambda content: (len(content), content))
    for file in kept.iterdir():
        if not file.name.startswith("fault-"):
            file.unlink()
    # Evenly over all sizes: the smallest alone would leave out what only larger ones reach.
    for content in contents[:: max(1, -(-len(contents) // _MOST_KEPT))]:
        (kept / hashlib.sha1(content).hexdigest()[:12]).write_bytes(content)
    return len(list(kept.iterdir()))


def _child(target: str, flags: list[str], running: Path) -> tuple[str, int]:
    """Run a fuzzer, which ends its process. Returns its output and exit code. running: file of the present input"""
    command = [sys.executable, "-m", "tests.fuzz.fuzzer", target, *flags]
    settings = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    settings |= {RUNNING: str(running)}
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    ended = subprocess.run(command, env=os.environ | settings, text=True, **output)
    return ended.stdout, ended.returncode


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
