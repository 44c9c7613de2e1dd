"""Accept length of a drafter that trains online, by round, with and without training, on new and on old traffic.

Prompts come from a file as in `bench accept`. `--category` selects one category that the drafter was not trained on,
such as arithmetic; `--preface` prepends a text to each prompt that changes the kind of answer. Each prompt is sent
once, in rounds, so that every round is new to the drafter. `--pause` adds idle time for training between rounds.

`--old FILE` are prompts of earlier traffic. Every other one is served before the rounds; the rest are held-out: sent
before and after the rounds with a `cache_salt`, so that the drafter does not learn from them.
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

from bench.harness.flags import load_prompts, non_negative_int, positive_int
from bench.harness.prompts import Prompt, equal_parts, sample
from bench.harness.ratios import resampled
from bench.harness.report import Report, new_figure
from bench.serve.outcome import Outcome
from bench.serve.outrider_system import generate, served, speculation
from outrider.checkpoints.checkpoint import resolve

_COUNTERS = ("steps", "kept", "rejected")


class Part(NamedTuple):
    """Prompts that are sent together. learnt: the drafter may learn from them; pause: seconds behind them."""

    name: str
    prompts: Sequence[str]
    learnt: bool
    pause: float = 0.0


class Result(NamedTuple):
    """Answers to the prompts of a part, and the online training counters after it (empty without training)."""

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


def parts_of(rounds: Sequence[Sequence[Prompt]], old: Sequence[Prompt], args: argparse.Namespace) -> list[Part]:
    """What is sent, in order."""
    earlier, held_out = ([prompt.turns[0] for prompt in old[start::2]] for start in (0, 1))
    parts = [
        Part(str(number), [args.preface + prompt.turns[0] for prompt in prompts], True, args.pause)
        for number, prompts in enumerate(rounds, start=1)
    ]
    if not old:
        return parts
    before = [Part("old, before", held_out, False), Part("old, served", earlier, True, args.pause)]
    return [*before, *parts, Part("old, after", held_out, False)]


def measure(flags: Sequence[str], parts: Sequence[Part], args: argparse.Namespace) -> list[Result]:
    """Run all parts on one system. Without training there are no pauses, and equal parts are sent once."""
    training, results, known = "--online" in flags, [], {}
    with served(args.model, flags, args.dtype) as url, Progress() as progress:
        bar = progress.add_task("with training" if training else "without training", total=_requests(parts, training))
        for part in parts:
            key = tuple(part.prompts)
            if training or key not in known:
                body = {"temperature": args.temperature, "max_tokens": args.max_tokens}
                body |= {} if part.learnt else {"cache_salt": "held-out"}
                turns = [[text] for text in part.prompts]
                _, answers = asyncio.run(generate(url, turns, args.concurrency, body, lambda _: progress.advance(bar)))
                known[key] = [answer for (answer,) in answers]
                time.sleep(part.pause if training else 0.0)
            metrics = httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text
            results.append(Result(known[key], learning_counters(metrics)))
    return results


def _requests(parts: Sequence[Part], training: bool) -> int:
    """Number of requests of all parts on one system."""
    sent = [tuple(part.prompts) for part in parts]
    return sum(map(len, sent if training else set(sent)))


def length_ratio(online: Sequence[Outcome], frozen: Sequence[Outcome]) -> tuple[float, float, float]:
    """Accept length with training over that without, and its 95 % interval over random choices of the prompts."""

    def of(chosen: Sequence[tuple[Outcome, Outcome]]) -> float:
        trained, untrained = zip(*chosen, strict=True)
        return speculation(trained)["accept_length"] / speculation(untrained)["accept_length"]

    return resampled(list(zip(online, frozen, strict=True)), of)


def add_rows(report: Report, parts: Sequence[Part], online: Sequence[Result], frozen: Sequence[Result]) -> None:
    """Add a row per part, and one for the last third of the rounds together."""
    rounds = [index for index, part in enumerate(parts) if part.name.isdigit()]
    for index, part in enumerate(parts):
        _add_row(report, part.name, online[index], frozen[index])
        if index == rounds[-1]:
            last = rounds[-max(1, len(rounds) // 3) :]
            whole = [
                Result([answer for i in last for answer in results[i].answers], results[index].counters)
                for results in (online, frozen)
            ]
            _add_row(report, f"{parts[last[0]].name} to {part.name}", *whole)


def _add_row(report: Report, name: str, online: Result, frozen: Result) -> None:
    same = sum(a.text == b.text for a, b in zip(online.answers, frozen.answers, strict=True))
    mean, low, high = length_ratio(online.answers, frozen.answers)
    lengths: dict[str, Any] = {
        "online": speculation(online.answers)["accept_length"],
        "frozen": speculation(frozen.answers)["accept_length"],
    }
    counts = {counter: online.counters.get(counter, 0) for counter in _COUNTERS}
    interval = {"over_frozen": mean, "low": low, "high": high}
    report.add(round=name, **lengths, **interval, **counts, same_text=f"{same}/{len(online.answers)}")


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
    parser.add_argument("--limit", type=positive_int, help="prompts of all rounds, chosen at random (default: all)")
    parser.add_argument("--rounds", type=positive_int, default=10)
    parser.add_argument("--old", type=Path, help="prompts of earlier traffic, in the same formats")
    parser.add_argument("--old-limit", type=non_negative_int, default=80, help="prompts of earlier traffic")
    parser.add_argument("--max-tokens", type=positive_int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--concurrency", type=positive_int, default=4, help="concurrent conversations")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between rounds, with training")
    parser.add_argument("--share", type=float, default=0.2, help="share of time for training, as --online-share")
    parser.add_argument("--flags", type=shlex.split, default="--speculative-always",
                        help="additional flags of both systems, as one argument")  # fmt: skip
    parser.add_argument("--online-flags", type=shlex.split, default="",
                        help="additional flags of the system with training, as one argument")  # fmt: skip
    args = parser.parse_args(argv)
    chosen = [prompt for prompt in load_prompts(parser, args.prompts) if args.category in (None, prompt.category)]
    prompts = sample(chosen, None, seed=0)[: args.limit]
    old = sample(load_prompts(parser, args.old), None, seed=0)[: args.old_limit] if args.old is not None else []
    rounds = equal_parts(prompts, args.rounds)
    if not rounds or not rounds[0]:
        parser.error(f"{args.prompts} has {len(prompts)} such prompts; {args.rounds} rounds need at least one each")
    args.model = str(resolve(args.model_path))
    flags = ["--speculative-algorithm", args.algorithm, "--speculative-draft-model-path", args.draft, *args.flags]
    training = ["--online", "--online-share", str(args.share), *args.online_flags]
    report = Report("online", "Accept length of a drafter that trains online, by round")
    report.notes = _notes(args, len(rounds[0]), old)
    parts = parts_of(rounds, old, args)
    frozen = measure(flags, parts, args)
    add_rows(report, parts, measure([*flags, *training], parts, args), frozen)
    plot(report)
    report.write()


def _notes(args: argparse.Namespace, size: int, old: Sequence[Prompt]) -> list[str]:
    part = f"category {args.category}" if args.category else "all categories"
    part += f", each after {args.preface!r}" if args.preface else ""
    notes = [
        f"{Path(args.model).name}, {args.dtype}; {args.algorithm} {Path(args.draft).name}; {args.rounds} rounds of "
        f"{size} prompts of {args.prompts.name} ({part}), each sent once, concurrency {args.concurrency}, answers of "
        f"at most {args.max_tokens} tokens, temperature {args.temperature:g}, {args.pause:g} s between rounds",
        f"online: --online with a share of {args.share:g} of the time {' '.join(args.online_flags)}; both: "
        f"{' '.join(args.flags)}",
        "online, frozen: accept length (tokens per step, bonus included) with and without online training; over_frozen "
        "with low and high: their ratio and its 95 % interval (bootstrap over prompts)",
        "steps, kept, rejected: training steps, accepted and rejected updates so far; same_text: equal answers of both",
    ]
    if old:
        notes.append(
            f"old: {len(old)} prompts of {args.old.name}; half are served before the rounds, the others are held out "
            "and sent before and after them, never learnt from"
        )
    return notes


def plot(report: Report) -> None:
    """Accept length by part, and its ratio to that without training, with intervals."""
    figure = new_figure(9.6, 3.6)
    lengths, ratios = figure.subplots(1, 2)
    rows = [row for row in report.rows if " to " not in row["round"]]
    old = [i for i, row in enumerate(rows) if not row["round"].isdigit()]
    new = [i for i in range(len(rows)) if i not in old]
    for name, style, color in (("online", "o", "C0"), ("frozen", "s", "C1")):
        lengths.plot(new, [rows[i][name] for i in new], f"{style}-", color=color, label=f"{name}, new traffic")
        if old:
            lengths.plot(
                old, [rows[i][name] for i in old], style, color=color, mfc="none", label=f"{name}, old traffic"
            )
    lengths.set_ylim(bottom=1.0)
    for part, style, label in ((new, "o", "new traffic"), (old, "s", "old traffic")):
        if part:
            means = [rows[i]["over_frozen"] for i in part]
            below = [rows[i]["over_frozen"] - rows[i]["low"] for i in part]
            above = [rows[i]["high"] - rows[i]["over_frozen"] for i in part]
            ratios.errorbar(part, means, [below, above], fmt=style, capsize=3, label=label)
    ratios.axhline(1.0, color="gray", linewidth=0.8)
    for axes, label in ((lengths, "accept length"), (ratios, "accept length, online over frozen (95 %)")):
        axes.set(xlabel="round", ylabel=label)
        axes.set_xticks(range(len(rows)), [row["round"].replace(", ", "\n") for row in rows], fontsize=7)
        axes.legend(fontsize=8)
    report.save(figure)
