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

# Name: module, description; in the order in which `all` runs them.
BENCHMARKS = {
    "streams": ("bench.streams.run", "overhead of the gateway per step, with simulated engines"),
    "transports": ("bench.streams.transports", "a system with a draft service: frames over gRPC against a socket"),
    "checks": ("bench.streams.checks", "cost of the services' checks of every message"),
    "system": ("bench.end_to_end.system", "throughput of the whole system against transformers generate"),
    "speculation": ("bench.speculation.run", "speedup of drafters and tree shapes over plain decoding; best flags"),
    "sources": ("bench.speculation.sources", "the draft service beside own draft sources, by request in one system"),
    "start": ("bench.end_to_end.start", "time from `outrider serve` to health, cold and warm, by process and phase"),
    "serve": ("bench.serve.run", "load generator for any OpenAI-style server: throughput and latency"),
    "peers": ("bench.peers.run", "Outrider beside other inference systems, on equal weights and prompts"),
    "scale": ("bench.scale.run", "speedup of speculation by context, sessions, acceptance, draft and network latency"),
    "ahead": ("bench.ahead.run", "drafting ahead with a head against waiting for it, by network delay and step time"),
    "pools": ("bench.pools.run", "pools of replicas with simulated engines: throughput, joins and losses, gateways"),
    "accept": ("bench.end_to_end.accept", "accept length of drafters by prompt category"),
    "drafters": ("bench.speculation.drafters", "accept length of drafters against the time of a proposal, on one core"),
    "limits": ("bench.limits.run", "what limits the accept length of a head: ranking, states, vocabulary"),
    "drafters-together": ("bench.together.run", "two drafters in one tree: accept length by the rule that merges them"),
    "online": ("bench.end_to_end.online", "accept length of a drafter that trains online, by round"),
    "rollouts": ("bench.end_to_end.rollouts", "a loop of rollouts and training: reward, accept length, time"),
    "target": ("bench.services.target", "target steps against their floor; draft tokens against plain decoding"),
    "self-speculation": ("bench.services.self_speculation", "self-speculation of the target against plain decoding"),
    "kernels": ("bench.services.target_kernels", "matrix products and attention of the target on a CPU"),
    "draft": ("bench.services.draft", "expansion steps of the draft service against their floor"),
    "trees": ("bench.services.draft_trees", "draft trees: several levels in one program against one program per level"),
    "draft-kernels": ("bench.services.draft_kernels", "attention of the draft service on an accelerator"),
    "quality": ("bench.services.quality", "loss of quality by quantized weights and KV caches"),
    "deterministic": ("bench.services.deterministic", "cost of --deterministic"),
    "gpu-train": ("bench.gpu.train", "a head trained further in minutes, from answers written beforehand"),
    "gpu": ("bench.gpu.run", "steps of an 8-billion-parameter target on a GPU against their floor"),
}  # fmt: skip
ALIASES = {"self-draft": "self-speculation"}  # earlier names
# `all` omits benchmarks that need a server, a file of prompts, a trained draft, an accelerator for JAX, or hours.
_NOT_IN_ALL = (
    "transports",
    "serve",
    "speculation",
    "sources",
    "peers",
    "scale",
    "ahead",
    "accept",
    "drafters",
    "limits",
    "drafters-together",
    "online",
    "rollouts",
    "draft-kernels",
    "gpu-train",
)


def usage() -> str:
    """The text of `--help`."""
    lines = [f"  {name:<16} {text}" for name, (_, text) in BENCHMARKS.items()]
    return "\n".join([
        "usage: outrider bench NAME [--output FOLDER] [FLAGS]        (NAME --help shows the flags of a benchmark)",
        "",
        *lines,
        f"  {'all':<16} all except {', '.join(_NOT_IN_ALL)}; gpu only on a machine with a GPU",
        "",
        "Reports are written to docs/benchmarks in a checkout, elsewhere to ./benchmarks; --output sets the folder.",
    ])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named benchmark. Returns the exit code."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["all"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    name = ALIASES.get(name, name)
    if name not in (*BENCHMARKS, "all"):
        print(f"there is no benchmark {name}; choose among {', '.join(BENCHMARKS)} and all", file=sys.stderr)
        return 2
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--output", type=Path)
    output, flags = common.parse_known_args(rest)
    if output.output is not None:
        try:
            report.set_folder(output.output)
        except OSError as error:
            print(f"outrider bench {name}: error: --output: {error}", file=sys.stderr)
            return 2
    with _exit_on_signals():
        return _run(name, flags) if name != "all" else max([_run_of_all(one, flags) for one in _names_in_all()])


def _run(name: str, flags: list[str]) -> int:
    return importlib.import_module(BENCHMARKS[name][0]).main(flags) or 0


def _run_of_all(name: str, flags: list[str]) -> int:
    """Run one of all benchmarks; an error is printed, so that the remaining ones still run."""
    try:
        return _run(name, flags)
    except OutriderError as error:
        print(f"outrider bench {name}: error: {error.message}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that child processes are ended by their contexts."""
    # nohup ignores SIGHUP; it stays ignored.
    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, lambda number, _: sys.exit(128 + number)) for one in numbers}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _names_in_all() -> list[str]:
    return [one for one in BENCHMARKS if one not in _NOT_IN_ALL and (one != "gpu" or shutil.which("nvidia-smi"))]


if __name__ == "__main__":
    sys.exit(cli.main(["bench", *sys.argv[1:]]))
