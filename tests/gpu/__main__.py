"""What needs a GPU: tests and benchmarks, one process after the other, the most valuable first.

make gpu                                        everything, most of an hour
make gpu ARGS="--minutes 9 --output results"    what fits into nine minutes; pages, logs and a summary in a folder
make gpu ARGS="--only system engine"            some parts
make gpu ARGS="--list"                          the parts, their commands, and the seconds that each may take
python -m tests.gpu                             the same without an installation, with the packages that are there

Every part has a limit, and ends with it: no part keeps another one from running. Pages are written while a part
measures, and the summary after each part, so that what was found stays if the machine is taken away.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from outrider.placement.devices import gpus

_ROOT = Path(__file__).parents[2]
GRACE = 40.0  # seconds from SIGTERM to SIGKILL: a benchmark ends its processes, which takes up to 30 each
LEAST = 30.0  # seconds that must be left for a part to begin
_LAST_LINES = 12  # of a part that failed, quoted in the summary
# JAX must not take the GPU that PyTorch uses in the same process, and must see it, which tests hide by default.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "", "XLA_FLAGS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One process. arguments: of Python. seconds: that it may take. pages: it writes reports of benchmarks.

    gpus: that the machine must have
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    pages: bool = False
    gpus: int = 1


def _tests(name: str, *files: str, seconds: float) -> Part:
    paths = [str(Path("tests/gpu", f"test_{file}.py")) for file in files]
    return Part(name, ("-m", "pytest", "-q", "-m", "gpu", "--timeout", "150", *paths), seconds)


def _bench(name: str, *arguments: str, seconds: float, gpus: int = 1) -> Part:
    return Part(name, ("-m", "bench", *arguments), seconds, pages=True, gpus=gpus)


_HEAD = ("--models", "head of Llama-8B")
_SYSTEM_SECONDS = 400.0
PARTS = (
    Part("doctor", ("-m", "outrider", "doctor"), 60),
    _tests("tests-steps", "prepared", "target", seconds=120),
    _bench("system", "gpu", "--parts", "system", "--seconds", f"{_SYSTEM_SECONDS - 30:g}", seconds=_SYSTEM_SECONDS),
    _bench("system-apart", "gpu", "--parts", "system", "--draft-device", "cuda:1", "--transports", "grpc",
           "--contexts", "1024", "--seconds", "210", seconds=240, gpus=2),
    _bench("engine", "gpu", "--parts", "engine", "--name", "gpu-engine", seconds=120),
    _tests("tests-draft", "draft", seconds=180),
    _bench("trees", "trees", *_HEAD, "--steps", "10", "--name", "draft-trees-gpu", seconds=180),
    _tests("tests-target", "overlap", "graphs", "fused", "ranks", seconds=240),
    _bench("draft", "draft", *_HEAD, "--kinds", "plain/bfloat16", "auto/bfloat16", "--shapes", "1x1", "1x8", "16x4",
           "--contexts", "2048", "--temperatures", "0", "--steps", "12", "--name", "draft-steps-gpu", seconds=180),
    _bench("steps", "gpu", "--parts", "step", "attention", seconds=240),
    _tests("tests-rest", "kernels", "sampling", "memory_plan", "weight_quantization", seconds=300),
    _bench("compiled", "gpu", "--parts", "compiled", "--name", "gpu-compiled", seconds=300),
    _bench("draft-kernels", "draft-kernels", seconds=300),
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Tests and benchmarks that need a GPU."""

    minutes: float = math.inf
    """Minutes after which everything ends."""
    only: tuple[str, ...] = ()
    """Run only these parts, in their usual order."""
    output: Path | None = None
    """Folder of pages, logs and summary. Default: pages in docs/benchmarks, the rest in .gpu."""
    list: bool = False
    """Print the parts, and run none."""


class Run:
    """The parts of one run, and its summary."""

    def __init__(self, deadline: float, output: Path | None, gpus: int = 1) -> None:
        """deadline: by the monotonic clock. gpus: of the machine."""
        self._deadline = deadline
        self._gpus = gpus
        self._pages = output
        self.folder = output or _ROOT / ".gpu"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lines: list[str] = []
        self.failed = False

    def parts(self, parts: Sequence[Part]) -> None:
        """Run parts one after the other, as far as there is time."""
        for part in parts:
            if part.gpus > self._gpus:
                self._note(f"{part.name}: did not run, because it needs {part.gpus} GPUs")
                continue
            left = self._deadline - time.monotonic() - GRACE
            if left < LEAST:
                self._note(f"{part.name}: did not run, because the time was over (--minutes)")
                continue
            self._part(part, min(part.seconds, left))

    def _part(self, part: Part, seconds: float) -> None:
        print(f"\n=== {part.name}, at most {seconds:.0f} s", flush=True)
        output = ["--output", str(self._pages)] if part.pages and self._pages is not None else []
        began = time.monotonic()
        log = self.folder / f"{part.name}.log"
        code = run_logged([sys.executable, *part.arguments, *output], log, seconds)
        took = f"{time.monotonic() - began:.0f} s"
        if code == 0:
            self._note(f"{part.name}: done in {took}")
            return
        why = f"ended after {took}, its limit" if code is None else f"failed with code {code} after {took}"
        last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        self._note("\n    ".join([f"{part.name}: {why}; {log} has its output, which ends with", *last]))
        self.failed = True

    def _note(self, line: str) -> None:
        self._lines.append(line)
        print(line, flush=True)
        (self.folder / "summary.txt").write_text("\n".join(self._lines) + "\n")


def run_logged(command: Sequence[str], log: Path, seconds: float) -> int | None:
    """Run a command in a process group of its own; its output is printed, and written into a file as it comes.

    Returns the exit code, or None if it took longer than `seconds` and was ended, with all that it had started.
    """
    environment = {**os.environ, **_ENVIRONMENT}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=_ROOT, env=environment, start_new_session=True, **pipes)
        copier = threading.Thread(target=_copy, args=(process, file), daemon=True)
        copier.start()
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
            copier.join(5.0)  # a process that left the group may still hold the pipe
            if not copier.is_alive():
                process.stdout.close()


def _copy(process: subprocess.Popen[bytes], file: object) -> None:
    for line in process.stdout:
        for stream in (file, sys.stdout.buffer):
            stream.write(line)
            stream.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: politely, if it still runs; what is left of the group is killed."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def chosen(only: Sequence[str]) -> list[Part]:
    """The named parts, or all. Exits for a name that is none."""
    names = [part.name for part in PARTS]
    if unknown := sorted(set(only) - set(names)):
        raise SystemExit(f"there is no part {', '.join(unknown)}; choose among {', '.join(names)}")
    return [part for part in PARTS if not only or part.name in only]


def _listing(parts: Sequence[Part]) -> Iterator[str]:
    for part in parts:
        yield f"{part.name:<14} {part.seconds:>4.0f} s   python {' '.join(part.arguments)}"


def main(options: Options) -> int:
    """Run what was chosen. Returns 1 if a part failed, or took too long, or if there is no GPU."""
    parts = chosen(options.only)
    if options.list:
        print("\n".join(_listing(parts)))
        return 0
    if shutil.which("nvidia-smi") is None:
        print("There is no NVIDIA GPU on this machine; nothing of this ran.", file=sys.stderr)
        return 1
    run = Run(time.monotonic() + 60 * options.minutes, options.output, len(gpus()))
    run.parts(parts)
    print(f"\n{(run.folder / 'summary.txt').read_text()}", flush=True)
    return int(run.failed)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
