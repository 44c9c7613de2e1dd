"""`outrider bench NAME [flags]`, or `python -m bench`: runs one benchmark, or all of them, and writes their reports."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.harness import report
from outrider import cli
from outrider.errors import OutriderError

# Name to module, and what it says; in the order in which `all` runs them.
BENCHMARKS = {
    "streams": ("bench.streams.run", "what the gateway adds to a step"),
    "system": ("bench.end_to_end.system", "the whole system against transformers generate"),
    "speculation": ("bench.speculation.run", "drafters and their trees side by side; proposes the best flags"),
    "serve": ("bench.serve.run", "load on any OpenAI-style server: throughput and latencies"),
    "peers": ("bench.peers.run", "our system beside others on the same weights and prompts"),
    "scale": ("bench.scale.run", "how speculation grows with context, sessions, acceptance, latencies"),
    "accept": ("bench.end_to_end.accept", "how much drafters foretell, by kind of prompt"),
    "online": ("bench.end_to_end.online", "a draft that learns while it serves"),
    "target": ("bench.services.target", "steps of the target against their floors; hints against plain decoding"),
    "self-draft": ("bench.services.self_speculation", "drafts of the target's own against plain steps"),
    "kernels": ("bench.services.kernels", "products and attention of the target on a CPU against their floors"),
    "draft": ("bench.services.draft", "rounds of growth of the draft against their floors"),
    "trees": ("bench.services.trees", "explicit trees of the draft: one program against a round a level"),
    "draft-kernels": ("bench.services.draft_kernels", "the draft's attention on an accelerator"),
    "quality": ("bench.services.quality", "what narrow weights and caches cost in quality"),
    "deterministic": ("bench.services.deterministic", "what --deterministic costs"),
    "gpu": ("bench.gpu.run", "a step of a large model on a GPU against its floor"),
}
# These need what not every machine has: a server, a file of prompts, a draft, an accelerator of JAX's, much time.
_ASKED_FOR = ("serve", "speculation", "peers", "scale", "accept", "online", "draft-kernels")


def usage() -> str:
    """What `--help` shows."""
    lines = [f"  {name:<14} {text}" for name, (_, text) in BENCHMARKS.items()]
    return "\n".join([
        "usage: outrider bench NAME [--output FOLDER] [FLAGS]        (NAME --help shows a benchmark's flags)",
        "",
        *lines,
        f"  {'all':<14} all of them but {', '.join(_ASKED_FOR)}, and gpu only where there is one",
        "",
        "Reports go to docs/benchmarks in a checkout and to ./benchmarks elsewhere; --output names another folder.",
    ])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatch by name. Returns the exit code."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["all"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name not in (*BENCHMARKS, "all"):
        print(f"there is no benchmark {name}; choose among {', '.join(BENCHMARKS)} and all", file=sys.stderr)
        return 2
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--output", type=Path)
    chosen, flags = common.parse_known_args(rest)
    if chosen.output is not None:
        try:
            report.write_into(chosen.output)
        except OSError as error:
            print(f"outrider bench {name}: error: --output: {error}", file=sys.stderr)
            return 2
    with _orderly_end():
        return _run(name, flags) if name != "all" else max([_one_of_many(one, flags) for one in _those_of_all()])


def _run(name: str, flags: list[str]) -> int:
    return importlib.import_module(BENCHMARKS[name][0]).main(flags) or 0


def _one_of_many(name: str, flags: list[str]) -> int:
    """A benchmark that does not keep the others from running where this machine cannot run it."""
    try:
        return _run(name, flags)
    except OutriderError as error:
        print(f"outrider bench {name}: error: {error.message}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """What a benchmark has started ends with it, also where it is ended, or the terminal is closed that it runs in."""
    # Under nohup the terminal's end is ignored, and stays so.
    asked = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, lambda number, _: sys.exit(128 + number)) for one in asked}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _those_of_all() -> list[str]:
    return [one for one in BENCHMARKS if one not in _ASKED_FOR and (one != "gpu" or shutil.which("nvidia-smi"))]


if __name__ == "__main__":
    sys.exit(cli.main(["bench", *sys.argv[1:]]))
