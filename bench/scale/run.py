"""Tokens a second, with hints over without, as the work grows: context, sessions, acceptance, draft and network.

The target and the gateway are real; the draft is simulated, so that one thing changes at a time. Requests with and
without hints alternate on the same processes. Beside the ratio stands what theory.py expects of steps as they were
measured, and what a round through the streams takes.
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
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress
from tokenizers import Tokenizer

from bench.end_to_end.system import PROMPTS
from bench.harness.flags import whole
from bench.harness.prompts import read_prompts
from bench.harness.report import Report
from bench.scale.system import Draft, gateway, remember, target, tell
from bench.scale.theory import Cost, speedup
from outrider.checkpoints.checkpoint import resolve
from outrider.config import TargetConfig

_ROWS = (1, 2, 4, 8, 12, 16)  # of steps that are measured
_STEPS = 30
_STREAMS = 0.0007  # seconds of a round through the streams (docs/benchmarks/streams.md)


class Cell(NamedTuple):
    """One point of an axis."""

    axis: str
    value: float
    context: int
    sessions: int
    draft: Draft


def cells(args: argparse.Namespace) -> list[Cell]:
    """All points. What an axis does not say is as of `args`."""
    usual = Draft(args.acceptance, args.draft_ms / 1e3, 0.0, args.tokens)
    axes: dict[str, list[Cell]] = {
        "context": [Cell("context", n, n, 1, usual) for n in args.contexts],
        "sessions": [Cell("sessions", n, args.context, n, usual) for n in args.sessions],
        "acceptance": [Cell("acceptance", a, args.context, 1, replace(usual, acceptance=a)) for a in args.acceptances],
        "draft ms": [Cell("draft ms", ms, args.context, 1, replace(usual, seconds=ms / 1e3)) for ms in args.delays],
        "network ms": [Cell("network ms", ms, args.context, 1, replace(usual, delay=ms / 1e3)) for ms in args.delays],
    }
    return [cell for name in args.axes for cell in axes[name]]


def targets(todo: Sequence[Cell]) -> list[list[Cell]]:
    """Points that are measured at one target after another. More and more sessions come to the same one; what else
    changes stays as it is for as long as a target lives, so that it need not find out first that it has.
    """
    groups: list[list[Cell]] = []
    for cell in todo:
        if groups and cell.axis == groups[-1][-1].axis == "sessions":
            groups[-1].append(cell)
        else:
            groups.append([cell])
    return groups


def step_costs(model: str, dtype: str, contexts: Iterable[int]) -> dict[int, Cost]:
    """For each context: seconds of a step of the engine alone by its number of hints.

    Between measured points they lie on straight lines.
    """
    from bench.services.target import verified_steps
    from services.target.process.app import build_engine

    engine = build_engine(
        resolve(model), TargetConfig(model_path=model, dtype=dtype, disable_radix_cache=True, self_speculation="off")
    )  # type: ignore[arg-type]
    taken = {context: verified_steps(engine, _ROWS, _STEPS, context) for context in contexts}
    del engine
    gc.collect()
    return {context: partial(_between, seconds) for context, seconds in taken.items()}


def _between(seconds: Sequence[float], hints: int) -> float:
    """Seconds of a step with so many hints. seconds: of steps with _ROWS rows."""
    return float(np.interp(hints + 1, _ROWS, seconds))


def prompts(folder: Path, context: int, count: int) -> list[list[int]]:
    """So many different prompts of so many tokens, of the benchmark's texts."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [prompt.turns[0] for prompt in read_prompts(PROMPTS)]
    found = []
    for i in range(count):
        tokens: list[int] = []
        at = i
        while len(tokens) < context:
            tokens += tokenizer.encode(f"Question {at}. {texts[at % len(texts)]}\n", add_special_tokens=False).ids
            at += 1
        found.append(tokens[:context])
    return found


def measure(
    address: str, asked: Sequence[Sequence[int]], new: int, rounds: int
) -> Iterator[tuple[float, float, float]]:
    """Tokens a second plain and with hints, and tokens a step, round by round; the first one is to get used to it."""
    for turn in range(rounds + 1):
        order = (False, True) if turn % 2 else (True, False)
        told = {hints: asyncio.run(tell(address, asked, new, hints)) for hints in order}
        assert [t.tokens for t in told[True]] == [t.tokens for t in told[False]], "hints never change the text"
        if turn:
            rates = [sum(t.rate for t in told[hints]) for hints in (False, True)]
            yield rates[0], rates[1], statistics.mean(t.accept for t in told[True])


def main(argv: Sequence[str]) -> None:
    """Run the benchmark and write docs/benchmarks/scale.*."""
    names = ["context", "sessions", "acceptance", "draft ms", "network ms"]
    parser = argparse.ArgumentParser(prog="outrider bench scale", description=__doc__)
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--axes", nargs="+", choices=names, default=names)
    parser.add_argument("--contexts", type=whole, nargs="+", default=[128, 512, 2048, 4096, 7936])
    parser.add_argument("--sessions", type=whole, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--acceptances", type=float, nargs="+", default=[0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 1.0, 2.0, 5.0, 10.0, 20.0])
    parser.add_argument("--context", type=whole, default=256, help="of all other axes, in tokens")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of all other axes")
    parser.add_argument("--draft-ms", type=float, default=1.0, help="of all other axes")
    parser.add_argument("--tokens", type=whole, default=16, help="of a chain that is proposed")
    parser.add_argument("--new-tokens", type=whole, default=128)
    parser.add_argument("--rounds", type=whole, default=3)
    args = parser.parse_args(argv)
    report = Report("scale", "How speculation grows: tokens per second with hints over those without")
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
        for group in targets(todo):
            with target(Path(where), flags) as address:
                for cell in group:
                    report.add(**_point(Path(where), folder, address, cell, args, costs))
                    progress.advance(bar)
                    _plot(report, args.axes)
                    report.write()


def _point(
    where: Path, folder: Path, address: str, cell: Cell, args: argparse.Namespace, costs: Mapping[int, Cost]
) -> dict[str, Any]:
    asked = prompts(folder, cell.context, cell.sessions)
    with gateway(where, address) as plain:
        texts = asyncio.run(tell(plain, asked, args.new_tokens, hints=False))
    remember(where, [[*prompt, *text.tokens] for prompt, text in zip(asked, texts, strict=True)])
    with gateway(where, address, cell.draft) as hinted:
        rounds = list(measure(hinted, asked, args.new_tokens, args.rounds))
    ratios = sorted(with_hints / without for without, with_hints, _ in rounds)
    row: dict[str, Any] = {
        "axis": cell.axis, "value": cell.value, "plain tokens/s": statistics.median(r[0] for r in rounds),
        "with hints": statistics.median(r[1] for r in rounds), "ratio": statistics.median(ratios),
        "lowest": ratios[0], "highest": ratios[-1], "accept length": statistics.median(r[2] for r in rounds),
    }  # fmt: skip
    if cell.sessions == 1:
        away = cell.draft.seconds + 2 * cell.draft.delay + _STREAMS
        row["expected"] = speedup(cell.draft.acceptance, costs[cell.context], away, cell.draft.tokens)
    return row


def _notes(args: argparse.Namespace, costs: Mapping[int, Cost]) -> list[str]:
    steps = "; ".join(
        f"at {context} tokens " + ", ".join(f"{rows} {1e3 * cost(rows - 1):.1f}" for rows in _ROWS)
        for context, cost in costs.items()
    )
    expected = (
        "expected (bench/scale/theory.py), for one session: of steps of the engine alone at the point's context, rows "
        f"and ms: {steps}; and of {1e3 * _STREAMS:g} ms for a round through the streams; the target does what pays "
        "best, at least plain steps"
    )
    return [
        f"{resolve(args.model_path).name}, {args.dtype}; greedy, {args.new_tokens} new tokens; where an axis does not "
        f"say otherwise: {args.context} tokens of context, 1 session, acceptance {args.acceptance:g}, proposals of "
        f"{args.tokens} tokens {args.draft_ms:g} ms after a commit, no network between",
        "ratio: median of rounds in which requests with and without hints alternate on the same processes; lowest and "
        "highest of them; texts are compared, and equal",
        "the draft is simulated and uses no core: it waits; network: one way, each way",
        "the sessions' points are one target's, one after another; each other point is a target's own",
        *([expected] if costs else []),
    ]


def _plot(report: Report, axes: Sequence[str]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(axes), figsize=(3.0 * len(axes), 3.0), layout="constrained", squeeze=False)
    for panel, name in zip(panels[0], axes, strict=True):
        rows = [row for row in report.rows if row["axis"] == name]
        x, ratio = [row["value"] for row in rows], [row["ratio"] for row in rows]
        spread = [[r["ratio"] - r["lowest"] for r in rows], [r["highest"] - r["ratio"] for r in rows]]
        panel.errorbar(x, ratio, yerr=spread, fmt="o-", markersize=3, capsize=2, label="measured")
        if any("expected" in row for row in rows):
            known = [row for row in rows if "expected" in row]
            panel.plot([r["value"] for r in known], [r["expected"] for r in known], "k--", label="expected")
        panel.axhline(1.0, color="gray", linewidth=0.8)
        if rows and name in ("context", "sessions"):  # no scale without points
            panel.set_xscale("log", base=2)
        panel.set(xlabel=name, ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("with hints / without")
    panels[0][-1].legend(fontsize=7)
    report.save(figure)
    plt.close(figure)
