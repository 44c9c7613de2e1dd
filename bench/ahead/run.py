"""Drafting ahead with a feature-based head, by network delay and length of the target's step, beside waiting for it.

All services are real; the draft service has a core of its own, and a proxy delays what it sends and receives. The
target's steps last as long as those of a larger model. All modes and plain decoding take turns, prompt by prompt, on
the same processes; all texts are equal.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.ahead import theory
from bench.ahead.control import Mode
from bench.ahead.system import Answer, System, started
from bench.harness.flags import load_prompts, positive_float, positive_int
from bench.harness.prompts import BUNDLED_PROMPTS
from bench.harness.ratios import ratio
from bench.harness.report import Report, new_figure
from outrider.config import flag_of

_PLAIN = "plain"
_TREE_SECONDS = 0.006  # from a commit to its tree without a delay: streams, features, and the program of the tree
Answers = Mapping[str, Sequence[Answer]]


def main(argv: Sequence[str]) -> None:
    """Run the benchmark and write docs/benchmarks/ahead.*."""
    parser = argparse.ArgumentParser(prog="outrider bench ahead", description=__doc__)
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--draft", default=None, help="folder of the head (default: the bundled one)")
    parser.add_argument("--quantization", default="int8", help="number format of the target's weights")
    parser.add_argument(
        "--prompts", type=Path, default=BUNDLED_PROMPTS, help="file of prompts, whose first turns count"
    )
    parser.add_argument("--limit", type=positive_int, default=2, help="number of prompts")
    parser.add_argument("--new-tokens", type=positive_int, default=64, help="tokens of an answer")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 1.0, 2.0, 5.0, 10.0, 20.0],
                        help="one-way delays between gateway and draft service, in ms")  # fmt: skip
    parser.add_argument("--steps", type=positive_float, nargs="+", default=[20.0, 40.0],
                        help="shortest time of a target's step, in ms; 1 leaves it as it is")  # fmt: skip
    parser.add_argument("--modes", nargs="+", choices=[mode.value for mode in Mode], default=[m.value for m in Mode])
    parser.add_argument("--rounds", type=positive_int, default=1, help="how often each mode answers each prompt")
    args = parser.parse_args(argv)
    prompts, modes = load_prompts(parser, args.prompts), [Mode(mode) for mode in args.modes]
    report = Report("ahead", "Drafting ahead with a head, by network delay and length of the target's step")
    report.notes = _notes(args)
    cells = list(itertools.product(args.steps, args.delays))
    _measure_all(report, args, [prompt.turns[0] for prompt in prompts[: args.limit]], modes, cells)
    _plot(report, [mode.value for mode in modes])
    report.write()


def _draft_flags(args: argparse.Namespace) -> dict[str, str]:
    head = {"speculative_draft_model_path": args.draft} if args.draft else {}
    return {"model_path": args.model_path, "speculative_algorithm": "EAGLE3", **head}


def _measure_all(
    report: Report,
    args: argparse.Namespace,
    texts: Sequence[str],
    modes: Sequence[Mode],
    cells: Sequence[tuple[float, float]],
) -> None:
    """Add the rows of all cells, measured on real services."""
    draft_flags = [part for name, value in _draft_flags(args).items() for part in (flag_of(name), value)]
    target_flags = ["--model-path", args.model_path, "--quantization", args.quantization]
    with (
        tempfile.TemporaryDirectory(prefix="outrider-") as where,
        started(Path(where), target_flags, draft_flags) as system,
        Progress() as progress,
    ):
        bar = progress.add_task("cells", total=len(cells))
        for mode in modes:  # what comes once, such as the first trees and the costs of their verification
            system.set(mode, 1.0, 0.0)
            system.ask(texts[0], args.new_tokens)
        for step_ms, delay_ms in cells:
            add_rows(report, step_ms, delay_ms, measure(system, modes, texts, step_ms, delay_ms, args))
            add_expected(report.rows)
            report.write()
            progress.advance(bar)


def measure(
    system: System, modes: Sequence[Mode], texts: Sequence[str], step_ms: float, delay_ms: float, args: Any
) -> Answers:
    """The answers of each mode, and of plain decoding, in turns. Their texts are equal."""
    answers: dict[str, list[Answer]] = {name: [] for name in (_PLAIN, *(mode.value for mode in modes))}
    if Mode.AUTO in modes:
        system.set(Mode.AUTO, step_ms, delay_ms)
        system.ask(texts[0], 2 * args.new_tokens)
    for turn, text in itertools.product(range(args.rounds), texts):
        order = [_PLAIN, *(mode.value for mode in modes)]
        for name in order if turn % 2 == 0 else order[::-1]:
            system.set(Mode.TIERS if name == _PLAIN else Mode(name), step_ms, delay_ms)
            answers[name].append(system.ask(text, args.new_tokens, speculate=name != _PLAIN))
    for same in zip(*answers.values(), strict=True):
        assert len({answer.tokens for answer in same}) == 1, "speculation never changes the text"
    return answers


def add_rows(report: Report, step_ms: float, delay_ms: float, answers: Answers) -> None:
    """A row for each mode of one cell."""
    for name, own in answers.items():
        row: dict[str, Any] = {"step ms": step_ms, "delay ms": delay_ms, "mode": name}
        steps = sum(answer.steps for answer in own)
        row["accept length"] = sum(answer.step_tokens for answer in own) / steps
        row["in time"] = sum(answer.drafted for answer in own) / steps
        row["tokens/s"] = _rate(own)
        for other in (_PLAIN, Mode.WAITING.value):
            if name not in (_PLAIN, other) and other in answers:
                pairs = zip(own, answers[other], strict=True)
                row[f"to {other}"] = ratio([mine.rate / others.rate for mine, others in pairs]).mean
        report.add(**row)


def _rate(answers: Sequence[Answer]) -> float:
    """Tokens/s over all answers: tokens over seconds, each behind the answer's first token."""
    return sum(a.step_tokens for a in answers) / sum(a.step_tokens / a.rate for a in answers)


def add_expected(rows: list[dict[str, Any]]) -> None:
    """The expected throughput of each cell, from figures of the cell with the least delay at the same step."""
    for _, group in itertools.groupby(rows, key=lambda row: row["step ms"]):
        cells = [list(cell) for _, cell in itertools.groupby(group, key=lambda row: row["delay ms"])]
        nearest = {row["mode"]: row for row in cells[0]}
        waiting, tiers = nearest.get(Mode.WAITING.value), nearest.get(Mode.TIERS.value)
        if waiting is None or tiers is None:
            continue
        step = 1 / nearest[_PLAIN]["tokens/s"]
        tau = max(waiting["accept length"], 1.0)
        latency = _TREE_SECONDS + 2 * waiting["delay ms"] / 1e3
        prepared = theory.prepared_of(tiers["in time"], tau, step, latency)
        for cell in cells:
            latency = _TREE_SECONDS + 2 * cell[0]["delay ms"] / 1e3
            for row in cell:
                if row["mode"] == Mode.WAITING.value:
                    row["expected"] = theory.waiting(tau, step, latency)
                elif row["mode"] == Mode.TIERS.value:
                    row["expected"] = theory.ahead(tau, step, latency, prepared)


def _notes(args: argparse.Namespace) -> list[str]:
    return [
        f"{args.model_path} in {args.quantization} and its EAGLE-3 head; {args.limit} prompts, {args.new_tokens} new "
        f"tokens, greedy, one session, {args.rounds} rounds; all texts are equal",
        "waiting: the draft waits for the target's features, the target for the draft. own features: the draft keeps "
        "and extends what survives a commit, by its own features; the target waits for nothing. two tiers: the same, "
        "but the draft starts a new tree when the target's features arrive. auto: two tiers, and the target measures "
        "whether waiting pays, at first in an answer that does not count; later trials are a part of the figure",
        "in time: share of steps with draft tokens; delay: one way, between gateway and draft service; step: shortest "
        "time of the target's steps, which sleeps after computing",
        "expected (bench/ahead/theory.py): from the accept length of waiting and the share in time of two tiers at the "
        f"least delay, and {1e3 * _TREE_SECONDS:g} ms from a commit to its tree",
    ]


def _plot(report: Report, modes: Sequence[str]) -> None:
    steps = list(dict.fromkeys(row["step ms"] for row in report.rows))
    figure = new_figure(4.0 * len(steps), 3.4)
    panels = figure.subplots(1, len(steps), squeeze=False)[0]
    for panel, step_ms in zip(panels, steps, strict=True):
        for i, name in enumerate([_PLAIN, *modes]):
            rows = [row for row in report.rows if row["step ms"] == step_ms and row["mode"] == name]
            delays = [row["delay ms"] for row in rows]
            panel.plot(delays, [row["tokens/s"] for row in rows], "o-", markersize=3, color=f"C{i}", label=name)
            if rows and "expected" in rows[0]:
                panel.plot(delays, [row["expected"] for row in rows], "--", color=f"C{i}", linewidth=0.8)
        panel.set(xlabel="one-way delay, ms", title=f"step of {step_ms:g} ms", ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens/s (dashed: expected)")
    panels[-1].legend(fontsize=7)
    report.save(figure)
