"""Speedup of speculation over plain decoding, by context, sessions, acceptance, draft latency and network latency.

The target and the gateway are real. The draft service is simulated, so that one parameter changes at a time. Requests
with and without speculation alternate on the same processes. The column `expected` has the speedup that theory.py
computes from measured step times and the latency of the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from rich.progress import Progress

from bench.harness.flags import positive_int
from bench.harness.prompts import token_prompts
from bench.harness.report import Report, new_figure
from bench.scale.system import Draft, gateway, generate, target, write_texts
from bench.scale.theory import Cost, speedup
from outrider.checkpoints.checkpoint import resolve
from outrider.config import DType, TargetConfig

STEP_TOKENS = (1, 2, 4, 8, 12, 16)  # tokens of the measured steps
STEPS = 30  # timed steps of each size
STREAM_LATENCY = 0.0007  # seconds from target to draft and back through the gateway (docs/benchmarks/streams.md)


class Cell(NamedTuple):
    """One point of an axis."""

    axis: str
    value: float
    context: int
    sessions: int
    draft: Draft


def cells(args: argparse.Namespace) -> list[Cell]:
    """The points of all axes; other parameters of a point have the values in `args`."""
    usual = Draft(args.acceptance, args.draft_ms / 1e3, 0.0, args.tokens)
    axes: dict[str, list[Cell]] = {
        "context": [Cell("context", n, n, 1, usual) for n in args.contexts],
        "sessions": [Cell("sessions", n, args.context, n, usual) for n in args.sessions],
        "acceptance": [Cell("acceptance", a, args.context, 1, replace(usual, acceptance=a)) for a in args.acceptances],
        "draft ms": [Cell("draft ms", ms, args.context, 1, replace(usual, seconds=ms / 1e3)) for ms in args.delays],
        "network ms": [Cell("network ms", ms, args.context, 1, replace(usual, delay=ms / 1e3)) for ms in args.delays],
    }
    return [cell for name in args.axes for cell in axes[name]]


def by_target(todo: Sequence[Cell]) -> list[list[Cell]]:
    """Groups of points that share a target process.

    Points of the axis `sessions` share one. Every other point has a new target, which has no estimates of an earlier
    acceptance or latency to unlearn.
    """
    groups: list[list[Cell]] = []
    for cell in todo:
        if groups and cell.axis == groups[-1][-1].axis == "sessions":
            groups[-1].append(cell)
        else:
            groups.append([cell])
    return groups


def step_costs(model: str, dtype: str, contexts: Iterable[int]) -> dict[int, Cost]:
    """For each context: seconds of an engine step by its number of draft tokens, linearly interpolated."""
    from bench.services.target import verification_steps
    from services.target.process.app import build_engine

    config = TargetConfig(model_path=model, dtype=cast(DType, dtype), disable_radix_cache=True, self_speculation="off")
    engine = build_engine(resolve(model), config)
    taken = {context: verification_steps(engine, STEP_TOKENS, STEPS, context) for context in contexts}
    del engine
    gc.collect()
    return {context: partial(_interpolate, seconds) for context, seconds in taken.items()}


def _interpolate(seconds: Sequence[float], draft_tokens: int) -> float:
    """Seconds of a step with this number of draft tokens. seconds: of steps with STEP_TOKENS tokens."""
    return float(np.interp(draft_tokens + 1, STEP_TOKENS, seconds))


def measure(
    address: str, asked: Sequence[Sequence[int]], new: int, rounds: int
) -> Iterator[tuple[float, float, float]]:
    """Tokens/s of plain decoding and of speculation, and accept length, per round. A first round is for warm-up."""
    for turn in range(rounds + 1):
        order = (False, True) if turn % 2 else (True, False)
        results = {speculate: asyncio.run(generate(address, asked, new, speculate)) for speculate in order}
        assert [t.tokens for t in results[True]] == [t.tokens for t in results[False]], (
            "speculation never changes the text"
        )
        if turn:
            rates = [sum(t.rate for t in results[speculate]) for speculate in (False, True)]
            yield rates[0], rates[1], statistics.mean(t.accept for t in results[True])


def main(argv: Sequence[str]) -> None:
    """Run the benchmark and write docs/benchmarks/scale.*."""
    names = ["context", "sessions", "acceptance", "draft ms", "network ms"]
    parser = argparse.ArgumentParser(prog="outrider bench scale", description=__doc__)
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--dtype", default="auto", help="number format of the target")
    parser.add_argument("--axes", nargs="+", choices=names, default=names, help="parameters to vary (default: all)")
    parser.add_argument("--contexts", type=positive_int, nargs="+", default=[128, 512, 2048, 4096, 7936],
                        help="points of the axis `context`, in tokens")  # fmt: skip
    parser.add_argument("--sessions", type=positive_int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64],
                        help="points of the axis `sessions`")  # fmt: skip
    parser.add_argument("--acceptances", type=float, nargs="+", default=[0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0],
                        help="points of the axis `acceptance`")  # fmt: skip
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 1.0, 2.0, 5.0, 10.0, 20.0],
                        help="points of the axes `draft ms` and `network ms`")  # fmt: skip
    parser.add_argument("--context", type=positive_int, default=256, help="tokens of context in the other axes")
    parser.add_argument("--acceptance", type=float, default=0.8, help="acceptance in the other axes")
    parser.add_argument("--draft-ms", type=float, default=1.0, help="draft latency in the other axes, in ms")
    parser.add_argument("--tokens", type=positive_int, default=16, help="draft tokens of a proposal")
    parser.add_argument("--new-tokens", type=positive_int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=positive_int, default=3, help="paired rounds per point")
    args = parser.parse_args(argv)
    report = Report("scale", "Speedup of speculation over plain decoding as one parameter grows")
    todo = cells(args)
    costs = step_costs(args.model_path, args.dtype, sorted({cell.context for cell in todo if cell.sessions == 1}))
    report.notes = _notes(args, costs)
    folder = resolve(args.model_path)
    longest = max(cell.context for cell in todo) + args.new_tokens
    most = max(cell.sessions for cell in todo)
    room = max(cell.sessions * (cell.context + args.new_tokens + 64) for cell in todo) + 4096
    flags = ["--model-path", args.model_path, "--dtype", args.dtype, "--max-running-requests", str(most)]
    flags += ["--max-total-tokens", str(room), "--context-length", str(longest + 1)]
    with tempfile.TemporaryDirectory(prefix="outrider-") as where, Progress() as progress:
        bar = progress.add_task("points", total=len(todo))
        for group in by_target(todo):
            with target(Path(where), flags) as address:
                for cell in group:
                    report.add(**measure_point(Path(where), folder, address, cell, args, costs))
                    progress.advance(bar)
                    _plot(report, args.axes)
                    report.write()


def measure_point(
    where: Path, folder: Path, address: str, cell: Cell, args: argparse.Namespace, costs: Mapping[int, Cost]
) -> dict[str, Any]:
    """A row of the report. where: folder of sockets and texts; folder: of the model; address: of the target."""
    asked = token_prompts(folder, cell.context, cell.sessions)
    with gateway(where, address) as plain:
        texts = asyncio.run(generate(plain, asked, args.new_tokens, speculate=False))
    write_texts(where, [[*prompt, *text.tokens] for prompt, text in zip(asked, texts, strict=True)])
    with gateway(where, address, cell.draft) as speculative:
        rounds = list(measure(speculative, asked, args.new_tokens, args.rounds))
    ratios = sorted(speculative / without for without, speculative, _ in rounds)
    row: dict[str, Any] = {
        "axis": cell.axis, "value": cell.value, "plain tokens/s": statistics.median(r[0] for r in rounds),
        "speculative tokens/s": statistics.median(r[1] for r in rounds), "ratio": statistics.median(ratios),
        "lowest": ratios[0], "highest": ratios[-1], "accept length": statistics.median(r[2] for r in rounds),
    }  # fmt: skip
    if cell.sessions == 1:
        draft_latency = cell.draft.seconds + 2 * cell.draft.delay + STREAM_LATENCY
        row["expected"] = speedup(cell.draft.acceptance, costs[cell.context], draft_latency, cell.draft.tokens)
    return row


def _notes(args: argparse.Namespace, costs: Mapping[int, Cost]) -> list[str]:
    steps = "; ".join(
        f"at {context} tokens of context " + ", ".join(f"{n} {1e3 * cost(n - 1):.1f}" for n in STEP_TOKENS)
        for context, cost in costs.items()
    )
    expected = (
        "expected (bench/scale/theory.py), for one session: from steps of the engine alone, their tokens and ms: "
        f"{steps}; and {1e3 * STREAM_LATENCY:g} ms for the streams; in the fastest mode, at least plain decoding"
    )
    return [
        f"{resolve(args.model_path).name}, {args.dtype}; greedy, {args.new_tokens} new tokens; unless varied: "
        f"{args.context} tokens of context, 1 session, acceptance {args.acceptance:g}, proposals of "
        f"{args.tokens} tokens {args.draft_ms:g} ms after a commit, no network latency",
        "ratio: speedup over plain decoding: median, lowest and highest of rounds in which requests with and without "
        "speculation alternate on the same processes; all texts are equal",
        "the draft service is simulated and uses no core; network: one-way latency, in each direction",
        "the points of `sessions` share one target process; every other point has its own",
        *([expected] if costs else []),
    ]


def _plot(report: Report, axes: Sequence[str]) -> None:
    figure = new_figure(3.0 * len(axes), 3.0)
    panels = figure.subplots(1, len(axes), squeeze=False)
    for panel, name in zip(panels[0], axes, strict=True):
        rows = [row for row in report.rows if row["axis"] == name]
        x, ratio = [row["value"] for row in rows], [row["ratio"] for row in rows]
        spread = [[r["ratio"] - r["lowest"] for r in rows], [r["highest"] - r["ratio"] for r in rows]]
        panel.errorbar(x, ratio, yerr=spread, fmt="o-", markersize=3, capsize=2, label="measured")
        if any("expected" in row for row in rows):
            known = [row for row in rows if "expected" in row]
            panel.plot([r["value"] for r in known], [r["expected"] for r in known], "k--", label="expected")
        panel.axhline(1.0, color="gray", linewidth=0.8)
        if rows and name in ("context", "sessions"):  # a logarithmic axis needs points
            panel.set_xscale("log", base=2)
        panel.set(xlabel=name, ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("speedup over plain decoding")
    panels[0][-1].legend(fontsize=7)
    report.save(figure)
