"""Accept length of a drafter that trains online, by round, with and without training.

Prompts come from a file as in `bench accept`. `--category` selects one category that the drafter was not trained on,
such as arithmetic; `--preface` prepends a text to each prompt that changes the kind of answer. Each prompt is sent
once, in rounds, so that every round is new to the drafter. `--pause` adds idle time for training between rounds.
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

from bench.harness.flags import load_prompts, positive_int
from bench.harness.prompts import Prompt, equal_parts
from bench.harness.report import Report, new_figure
from bench.serve.outcome import Outcome
from bench.serve.outrider_system import generate, served, speculation
from outrider.checkpoints.checkpoint import resolve

_COUNTERS = ("steps", "kept", "rejected")


class Round(NamedTuple):
    """Answers to the prompts of a round, and the online training counters after it (empty without training)."""

    answers: list[Outcome]
    counters: dict[str, int]


def learning_counters(metrics: str) -> dict[str, int]:
    """Counters of online training on the gateway's /metrics page, summed over draft services."""
    found: dict[str, int] = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        for counter in _COUNTERS:
            if name.startswith(f"outrider_online_{counter}_total{{"):
                found[counter] = found.get(counter, 0) + int(float(value))
    return found


def measure(flags: Sequence[str], rounds: Sequence[Sequence[Prompt]], args: argparse.Namespace) -> list[Round]:
    """Run all rounds on one system."""
    results = []
    body = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    with served(args.model, flags, args.dtype) as url, Progress() as progress:
        bar = progress.add_task("with training" if "--online" in flags else "without training", total=len(rounds))
        for prompts in rounds:
            turns = [[args.preface + prompt.turns[0]] for prompt in prompts]
            _, answers = asyncio.run(generate(url, turns, args.concurrency, body))
            time.sleep(args.pause)
            metrics = httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text
            results.append(Round([answer for (answer,) in answers], learning_counters(metrics)))
            progress.advance(bar)
    return results


def add_rows(report: Report, online: Sequence[Round], frozen: Sequence[Round]) -> None:
    """Add a row per round. online, frozen: rounds with and without training."""
    for number, (trained, untrained) in enumerate(zip(online, frozen, strict=True), start=1):
        same = sum(a.text == b.text for a, b in zip(trained.answers, untrained.answers, strict=True))
        lengths: dict[str, Any] = {
            "online": speculation(trained.answers)["accept_length"],
            "frozen": speculation(untrained.answers)["accept_length"],
        }
        counts = {counter: trained.counters.get(counter, 0) for counter in _COUNTERS}
        report.add(round=number, **lengths, **counts, same_text=f"{same}/{len(trained.answers)}")


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/online.*."""
    parser = argparse.ArgumentParser(prog="outrider bench online", description=__doc__)
    parser.add_argument("prompts", type=Path, help='JSON lines with "turns" or "prompt", and perhaps "category"')
    parser.add_argument("--draft", required=True, help="folder of the draft model")
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--dtype", default="auto", help="number format of the target")
    parser.add_argument("--category", help="use prompts of this category only (default: all)")
    parser.add_argument("--preface", default="", help="text prepended to every prompt")
    parser.add_argument("--rounds", type=positive_int, default=10)
    parser.add_argument("--max-tokens", type=positive_int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--concurrency", type=positive_int, default=4, help="concurrent conversations")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between rounds")
    parser.add_argument("--share", type=float, default=0.2, help="share of time for training, as --online-share")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate, as --online-learning-rate")
    parser.add_argument("--flags", type=shlex.split, default="--speculative-always",
                        help="additional flags of both systems, as one argument")  # fmt: skip
    args = parser.parse_args(argv)
    prompts = [prompt for prompt in load_prompts(parser, args.prompts) if args.category in (None, prompt.category)]
    rounds = equal_parts(prompts, args.rounds)
    if not rounds or not rounds[0]:
        parser.error(f"{args.prompts} has {len(prompts)} such prompts; {args.rounds} rounds need at least one each")
    args.model = str(resolve(args.model_path))
    flags = ["--speculative-algorithm", args.algorithm, "--speculative-draft-model-path", args.draft, *args.flags]
    training = ["--online", "--online-share", str(args.share), "--online-learning-rate", str(args.rate)]
    report = Report("online", "Accept length of a drafter that trains online, by round")
    report.notes = _notes(args, len(rounds[0]))
    frozen = measure(flags, rounds, args)
    add_rows(report, measure([*flags, *training], rounds, args), frozen)
    plot(report)
    report.write()


def _notes(args: argparse.Namespace, size: int) -> list[str]:
    part = f"category {args.category}" if args.category else "all categories"
    part += f", each after {args.preface!r}" if args.preface else ""
    return [
        f"{Path(args.model).name}, {args.dtype}; {args.algorithm} {Path(args.draft).name}; {args.rounds} rounds of "
        f"{size} prompts of {args.prompts.name} ({part}), each sent once, concurrency {args.concurrency}, answers of "
        f"at most {args.max_tokens} tokens, temperature {args.temperature:g}, {args.pause:g} s between rounds",
        f"online: --online with a share of {args.share:g} of the time, learning rate {args.rate:g}; "
        f"both: {' '.join(args.flags)}",
        "online, frozen: accept length (tokens per step, bonus included) with and without online training",
        "steps, kept, rejected: training steps, accepted and rejected updates so far; same_text: equal answers of both",
    ]


def plot(report: Report) -> None:
    """Accept length by round."""
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    for name, style in (("online", "o-"), ("frozen", "s--")):
        axes.plot([r["round"] for r in report.rows], [r[name] for r in report.rows], style, label=name)
    axes.set(xlabel="round", ylabel="accept length", title="prompts unseen by the drafter")
    axes.set_ylim(bottom=1.0)
    axes.legend()
    report.save(figure)
