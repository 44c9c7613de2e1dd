"""Let the fuzzers look for faults.

make fuzz                                       every target, a minute each
make fuzz ARGS="frames bodies --seconds 3600"   some of them, longer
make fuzz ARGS="grammars --keep"                keep what covers most in tests/fuzz/corpus, smallest first

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

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
_WORK = Path(".fuzz")  # what the fuzzers collect; a later run goes on with it
_MOST_KEPT, _LARGEST_KEPT = 60, 1500  # inputs of a target in the repository, and bytes of each
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
    """Keep the smallest inputs that cover what all inputs cover in tests/fuzz/corpus."""


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
        ended = _child(target, flags)
        for file in Path(found).iterdir():
            content = file.read_bytes()
            (kept / f"fault-{hashlib.sha1(content).hexdigest()[:10]}").write_bytes(content)
    executed = re.findall(r"stat::number_of_executed_units:\s*(\d+)", ended)
    covered = re.findall(r"\bcov: (\d+)", ended)
    code = int(not executed or "ERROR: libFuzzer" in ended or "Uncaught Python exception" in ended)
    if code:
        print("\n".join(ended.splitlines()[-40:]), file=sys.stderr)
    return code, (executed or ["?"])[-1], (covered or ["?"])[-1]


def _keep(target: str) -> int:
    """Minimize the kept inputs of a target. Returns their number; those of faults stay."""
    kept, work = CORPUS / target, _WORK / target
    small = [file for file in (*work.iterdir(), *kept.iterdir()) if file.stat().st_size <= _LARGEST_KEPT]
    with tempfile.TemporaryDirectory() as all_inputs, tempfile.TemporaryDirectory() as chosen:
        for file in small:
            (Path(all_inputs) / file.name).write_bytes(file.read_bytes())
        _child(target, ["-merge=1", chosen, all_inputs])
        contents = sorted((file.read_bytes() for file in Path(chosen).iterdir()), key=len)
    for file in kept.iterdir():
        if not file.name.startswith("fault-"):
            file.unlink()
    # Evenly over all sizes: the smallest alone would leave out what only larger ones reach.
    step = max(1, -(-len(contents) // _MOST_KEPT))
    for content in contents[::step]:
        (kept / hashlib.sha1(content).hexdigest()[:12]).write_bytes(content)
    return len(list(kept.iterdir()))


def _child(target: str, flags: list[str]) -> str:
    """Run a fuzzer, which ends its process. Returns its output."""
    command = [sys.executable, "-m", "tests.fuzz.fuzzer", target, *flags]
    settings = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    return subprocess.run(command, env=os.environ | settings, **output).stdout


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
