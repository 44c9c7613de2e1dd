"""What the draft service brings beside the target's own draft sources, and alone beside plain decoding.

One system answers the same prompts twice in turns, with other draft sources allowed by the request: so processes, cost
measurements and the machine's present speed are the same on both sides. Each side has its own `cache_salt`, so that
neither finds the answers of the other in a cache. A session that does not allow the draft service is not opened there.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from rich.console import Console
from rich.progress import Progress

from bench.harness.flags import load_prompts, positive_int
from bench.harness.prompts import equal_parts, sample
from bench.harness.report import Report
from bench.serve.client import Target
from bench.serve.outrider_system import ADMIN_HEADERS, served
from bench.speculation.paired_rounds import Cell, measured_row, run_pairs
from bench.speculation.run import Serve

_OWN = ("lookup", "head", "quantized")
_FORMATS: dict[str, tuple[str, ...]] = {
    "stored": (),  # as the checkpoint has them
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
}


class Sides(NamedTuple):
    """Two values of a request's `speculation`; None leaves all sources allowed."""

    sources: str
    allowed: dict[str, Any] | None
    over: str
    baseline: dict[str, Any] | str


SIDES = (
    Sides("all", None, "own sources", {"sources": list(_OWN)}),
    Sides("draft service", {"sources": ["draft"]}, "none", "off"),
)


def parser() -> argparse.ArgumentParser:
    """The command-line flags."""
    made = argparse.ArgumentParser(
        prog="outrider bench sources", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("prompts", type=Path, help="file of prompts, as in `outrider bench serve`")
    made.add_argument("--model-path", default="default")
    made.add_argument("--formats", nargs="+", choices=_FORMATS, default=["bfloat16", "int8"])
    made.add_argument("--flags", type=shlex.split, default=[], help="additional flags of the system, as one argument")
    made.add_argument("--max-tokens", type=positive_int, default=96, help="of an answer (default: %(default)s)")
    made.add_argument("--concurrency", type=positive_int, nargs="+", default=[1, 4, 8])
    made.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    made.add_argument("--num-prompts", type=positive_int, default=96, help="of all rounds (default: %(default)s)")
    made.add_argument("--rounds", type=positive_int, default=8, help="paired rounds (default: %(default)s)")
    return made


def main(argv: list[str], serve: Serve = served) -> None:
    """Measure, and write docs/benchmarks/sources.*. Raises BenchError."""
    flags = parser()
    args = flags.parse_args(argv)
    prompts = sample(load_prompts(flags, args.prompts), args.num_prompts, 0)
    parts = equal_parts([prompt._replace(turns=prompt.turns[:1]) for prompt in prompts], args.rounds)
    report = Report("sources", "The draft service beside the target's own draft sources, by request in one system")
    report.notes = [
        f"{shlex.join([args.model_path, *args.flags])}; {args.rounds} rounds of {len(parts[0])} prompts of "
        f"{args.prompts.name}, answers of at most {args.max_tokens} tokens",
        "sources, over: draft sources that the requests of the two sides allow; own sources: prompt lookup, a local "
        "head, a quantized copy; none: plain decoding",
        "ratio: speedup in tokens/s over the other side, geometric mean of the rounds; low, high: its 95 % confidence "
        "interval (Student's t over the rounds)",
        "accept_length: of the first side; same_text: equal answers of the two sides",
    ]
    cells = [Cell(temperature, concurrency) for temperature in args.temperature for concurrency in args.concurrency]
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("sources", total=2 * len(parts) * len(cells) * len(SIDES) * len(args.formats))
        for name in args.formats:
            progress.update(bar, description=name)
            with serve(args.model_path, (*_FORMATS[name], *args.flags), "auto", max(args.concurrency)) as url:
                for sides in SIDES:
                    targets = _targets(url, sides, args.max_tokens)
                    for cell in cells:
                        pairs = uvloop.run(run_pairs(*targets, parts, cell, lambda: progress.advance(bar)))
                        facts = {"format": name, "sources": sides.sources, "over": sides.over, **cell._asdict()}
                        report.add(**facts, **_shown(measured_row(pairs, "baseline")))
    report.write()


def _targets(url: str, sides: Sides, tokens: int) -> tuple[Target, Target]:
    bodies: Sequence[dict[str, Any]] = (
        {"cache_salt": "all", **({} if sides.allowed is None else {"speculation": sides.allowed})},
        {"cache_salt": "baseline", "speculation": sides.baseline},
    )
    first, second = (Target(url, body={"max_tokens": tokens, **body}, headers=ADMIN_HEADERS) for body in bodies)
    return first, second


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("rounds", "round_s", "acceptance_rate")}
