"""A draft that learns while it serves, on requests of one kind: accept length by round, with and without learning.

Prompts come from a file as of `bench accept`; `--category` takes those of one kind, such as questions of arithmetic,
which a draft that was trained on chats hardly knows, and `--preface` puts words before each of them that ask for
another kind of answer. They are asked once each, in rounds, so that every round is new to the draft. The system serves
all the time; between rounds it may be given a while to learn in (`--pause`).
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.progress import Progress

from bench.harness.flags import prompts_in, whole
from bench.harness.prompts import Prompt, rounds_of
from bench.harness.report import Report
from bench.serve.outcome import Outcome
from bench.serve.outrider_system import ask, served, speculation
from outrider.checkpoints.checkpoint import resolve

_COUNTS = ("steps", "kept", "rejected")


class Round(NamedTuple):
    """What a system said to the prompts of a round, and what its draft had learnt by then, if it learns."""

    answers: list[Outcome]
    learnt: dict[str, int]


def counted(metrics: str) -> dict[str, int]:
    """What drafts have learnt, from the gateway's metrics; nothing of those that do not learn."""
    found: dict[str, int] = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        for what in _COUNTS:
            if name.startswith(f"outrider_online_{what}_total{{"):
                found[what] = found.get(what, 0) + int(float(value))
    return found


def measure(flags: Sequence[str], rounds: Sequence[Sequence[Prompt]], args: argparse.Namespace) -> list[Round]:
    """All rounds through one system."""
    results = []
    body = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    with served(args.model, flags, args.dtype) as url, Progress() as progress:
        bar = progress.add_task("learning" if "--online" in flags else "as it was", total=len(rounds))
        for prompts in rounds:
            turns = [[args.preface + prompt.turns[0]] for prompt in prompts]
            _, answers = asyncio.run(ask(url, turns, args.concurrency, body))
            time.sleep(args.pause)
            metrics = httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text
            results.append(Round([answer for (answer,) in answers], counted(metrics)))
            progress.advance(bar)
    return results


def add_rows(report: Report, learning: Sequence[Round], still: Sequence[Round]) -> None:
    """A row a round."""
    for number, (own, other) in enumerate(zip(learning, still, strict=True), start=1):
        same = sum(a.text == b.text for a, b in zip(own.answers, other.answers, strict=True))
        lengths: dict[str, Any] = {
            "learning": speculation(own.answers)["accept_length"],
            "as_it_was": speculation(other.answers)["accept_length"],
        }
        counts = {what: own.learnt.get(what, 0) for what in _COUNTS}
        report.add(round=number, **lengths, **counts, same_text=f"{same}/{len(own.answers)}")


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/online.*."""
    parser = argparse.ArgumentParser(prog="outrider bench online", description=__doc__)
    parser.add_argument("prompts", type=Path, help='JSON lines with "turns" or "prompt", and perhaps "category"')
    parser.add_argument("--draft", required=True, help="the draft's folder")
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--dtype", default="auto", help="of the target")
    parser.add_argument("--category", help="prompts of this category alone")
    parser.add_argument("--preface", default="", help="words to put before every prompt")
    parser.add_argument("--rounds", type=whole, default=10)
    parser.add_argument("--max-tokens", type=whole, default=128, help="of an answer")
    parser.add_argument("--concurrency", type=whole, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between rounds")
    parser.add_argument("--share", type=float, default=0.2, help="of the time, to learn in")
    parser.add_argument("--rate", type=float, default=1e-4, help="of learning")
    parser.add_argument("--flags", type=shlex.split, default="--speculative-always",
                        help="further flags of both systems, as one word")  # fmt: skip
    args = parser.parse_args(argv)
    prompts = [prompt for prompt in prompts_in(parser, args.prompts) if args.category in (None, prompt.category)]
    rounds = rounds_of(prompts, args.rounds)
    if not rounds or not rounds[0]:
        parser.error(f"{args.prompts} has {len(prompts)} such prompts; {args.rounds} rounds need one each")
    args.model = str(resolve(args.model_path))
    flags = ["--speculative-algorithm", args.algorithm, "--speculative-draft-model-path", args.draft, *args.flags]
    learn = ["--online", "--online-share", str(args.share), "--online-learning-rate", str(args.rate)]
    report = Report("online", "A draft that learns while it serves: accept length by round")
    report.notes = _notes(args, len(rounds[0]))
    still = measure(flags, rounds, args)
    add_rows(report, measure([*flags, *learn], rounds, args), still)
    _plot(report)
    report.write()


def _notes(args: argparse.Namespace, size: int) -> list[str]:
    kind = f"category {args.category}" if args.category else "all categories"
    kind += f", each after {args.preface!r}" if args.preface else ""
    return [
        f"{Path(args.model).name}, {args.dtype}; {args.algorithm} {Path(args.draft).name}; {args.rounds} rounds of "
        f"{size} prompts of {args.prompts.name} ({kind}), each asked once, {args.concurrency} at a time, answers of at "
        f"most {args.max_tokens} tokens, temperature {args.temperature:g}, {args.pause:g} s between rounds",
        f"learning: --online with a share of {args.share:g} of the time, rate {args.rate:g}; "
        f"both: {' '.join(args.flags)}",
        "learning, as_it_was: accept length, tokens a step, bonus included, with and without learning",
        "steps, kept, rejected: of the learner by then; same_text: answers of the two systems that are equal",
    ]


def _plot(report: Report) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, style in (("learning", "o-"), ("as_it_was", "s--")):
        axes.plot(
            [r["round"] for r in report.rows], [r[name] for r in report.rows], style, label=name.replace("_", " ")
        )
    axes.set(xlabel="round", ylabel="accept length", title="prompts that the draft has not seen")
    axes.set_ylim(bottom=1.0)
    axes.legend()
    report.save(figure)
