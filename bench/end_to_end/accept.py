"""Accept length of drafters by prompt category and temperature, measured with `outrider serve`.

Prompts come from a file of JSON lines, each with a "category" and with the user's "turns" or a "prompt". Answers end at
the model's end of text. Every drafter starts without cached texts at each temperature.

Each drafter is measured in two ways: with the system's default policy, which skips draft tokens that would slow the
session down on this machine; and with `--speculative-always`, where every step waits for its proposal, so that the
accept length is independent of speed.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.progress import Progress, TaskID

from bench.harness.flags import drafter_argument, load_prompts, positive_int
from bench.harness.prompts import Prompt, first_per_category
from bench.harness.report import Report, new_figure, rows_to_resume
from bench.serve.outcome import Outcome
from bench.serve.outrider_system import ADMIN_HEADERS, generate, new_tokens, served, speculation
from outrider.checkpoints.checkpoint import resolve
from outrider.drafts import has_bundled_head

_HEAD = ("--speculative-algorithm", "EAGLE3")
_CHAIN = ("--speculative-num-steps", "5", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "6")
_TREE = ("--speculative-num-steps", "6", "--speculative-eagle-topk", "6", "--speculative-num-draft-tokens", "16")
_ALWAYS = "--speculative-always"
_PLAIN = "none"
DRAFTERS = {
    _PLAIN: ("--speculative-algorithm", "NONE"),
    "NGRAM": ("--speculative-algorithm", "NGRAM"),
    "EAGLE3": _HEAD,
    "EAGLE3 + NGRAM": (*_HEAD, "--speculative-ngram-beside"),
    "NGRAM, always": ("--speculative-algorithm", "NGRAM", _ALWAYS),
    "EAGLE3, chain, always": (*_HEAD, *_CHAIN, _ALWAYS),
    "EAGLE3, tree, always": (*_HEAD, *_TREE, _ALWAYS),
    "EAGLE3, tree + NGRAM, always": (*_HEAD, *_TREE, "--speculative-ngram-beside", _ALWAYS),
}


class Result(NamedTuple):
    """The measurement of a drafter at one temperature: seconds, and the answers to each prompt by turn."""

    seconds: float
    answers: list[list[Outcome]]


def measure(
    model: str,
    flags: Sequence[str],
    prompts: Sequence[Prompt],
    args: argparse.Namespace,
    temperatures: Sequence[float],
    name: str,
) -> dict[float, Result]:
    """Measure one drafter at several temperatures, in one system whose caches are flushed between them."""
    results = {}
    turns = [prompt.turns[: args.turns] for prompt in prompts]
    with served(model, flags, args.dtype) as url, Progress() as progress:
        for temperature in temperatures:
            bar = progress.add_task(f"{name}, temperature {temperature:g}", total=sum(map(len, turns)))
            httpx.post(f"{url}/flush_cache", headers=ADMIN_HEADERS, timeout=60).raise_for_status()
            body = {"temperature": temperature, "max_tokens": args.max_tokens}
            work = generate(url, turns, args.concurrency, body, partial(_advance, progress, bar))
            results[temperature] = Result(*asyncio.run(work))
    return results


def _advance(progress: Progress, bar: TaskID, _: Outcome) -> None:
    progress.advance(bar)


def add_rows(
    report: Report, name: str, temperature: float, result: Result, prompts: Sequence[Prompt], plain: Result | None
) -> None:
    """Add two rows: accept lengths and acceptance rates, over all prompts and by category.

    plain: the result of plain decoding; None if it comes from a resumed report, which has no texts
    """
    flat = [answer for answers in result.answers for answer in answers]
    by_category: dict[str, list[Outcome]] = {}
    for prompt, answers in zip(prompts, result.answers, strict=True):
        by_category.setdefault(prompt.category, []).extend(answers)
    # Prompts without a category have the category "all"; the column "all" has the figures of all prompts.
    measures: dict[str, dict[str, float]] = {"all": {}}
    measures |= {c: speculation(a) for c, a in by_category.items()} | {"all": speculation(flat)}
    facts: dict[str, Any] = {"drafter": name, "temperature": temperature}
    speed = new_tokens(flat) / result.seconds
    same = "-"
    if plain is not None:
        pairs = zip(flat, [answer for answers in plain.answers for answer in answers], strict=True)
        same = f"{sum(a.text == b.text for a, b in pairs)}/{len(flat)}"
    of_plain = [row for row in report.rows if row["drafter"] == _PLAIN and row["temperature"] == temperature]
    base = of_plain[0]["tokens_per_s"] if of_plain else speed
    speeds = {"tokens_per_s": speed, "over_plain": speed / base, "same_text": same}
    extras: tuple[tuple[str, dict[str, Any]], ...] = (("accept_length", speeds), ("acceptance_rate", {}))
    for measure_, extra in extras:
        report.add(**facts, measure=measure_, **extra, **{c: m[measure_] for c, m in measures.items()})


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/accept.*."""
    parser = argparse.ArgumentParser(prog="outrider bench accept", description=__doc__)
    parser.add_argument("prompts", type=Path, help='JSON lines with "category" and "turns" or "prompt"')
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--dtype", default="auto", help="number format of the target")
    parser.add_argument("--limit", type=positive_int, help="maximum prompts per category (default: all)")
    parser.add_argument("--turns", type=positive_int, help="maximum turns of a conversation (default: all)")
    parser.add_argument("--max-tokens", type=positive_int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--concurrency", type=positive_int, default=1, help="concurrent conversations")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--drafter", type=drafter_argument, action="append", default=[], metavar="NAME=FLAGS",
                        help="additional drafter, given by flags of `outrider serve`")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="keep the rows of the last run and measure missing ones")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="drafters to measure; plain decoding is always "
                        "included (default: all)")  # fmt: skip
    args = parser.parse_args(argv)
    usual = {
        name: flags for name, flags in DRAFTERS.items() if has_bundled_head(args.model_path) or _HEAD[1] not in name
    }
    drafters = usual | dict(args.drafter)
    if args.only is not None:
        if unknown := set(args.only) - drafters.keys():
            parser.error(f"--only: there is no drafter {', '.join(sorted(unknown))}; there are {', '.join(drafters)}")
        drafters = {name: flags for name, flags in drafters.items() if name == _PLAIN or name in args.only}
    model, prompts = args.model_path, first_per_category(load_prompts(parser, args.prompts), args.limit)
    report = Report("accept", "Accept length of drafters by prompt category")
    report.notes = _notes(args, model, prompts)
    if args.resume:
        try:
            report.rows = rows_to_resume("accept", lambda notes: notes == report.notes)
        except ValueError as error:
            parser.error(str(error))
    known = {(row["drafter"], row["temperature"]) for row in report.rows}
    plain: dict[float, Result] = {}
    for name, flags in drafters.items():
        missing = [temperature for temperature in args.temperature if (name, temperature) not in known]
        if not missing:
            continue
        for temperature, result in measure(model, flags, prompts, args, missing, name).items():
            if name == _PLAIN:
                plain[temperature] = result
            add_rows(report, name, temperature, result, prompts, plain.get(temperature))
        _plot(report)
        report.write()


def _notes(args: argparse.Namespace, model: str, prompts: Sequence[Prompt]) -> list[str]:
    part = "all" if args.limit is None else f"the first {args.limit} of each category"
    return [
        f"{resolve(model).name}, {args.dtype}; {len(prompts)} prompts of {args.prompts.name} ({part}), "
        f"{args.turns or 'all'} turns, answers of at most {args.max_tokens} tokens, ended by end of text, "
        f"concurrency {args.concurrency}",
        "accept_length: tokens per step, bonus included; acceptance_rate: accepted / verified draft tokens",
        "over_plain: speedup over plain decoding; same_text: answers equal to plain decoding's, if in the same run",
        "EAGLE3: the bundled head of the model",
        "always: every step waits for its proposal and verifies all of it; accept length does not depend on speed",
        "chain: 5 steps, top-1, 6 tokens verified; tree: 6 steps, top-6, 16 tokens verified",
    ]


def _plot(report: Report) -> None:
    rows = [row for row in report.rows if row["measure"] == "accept_length" and row["drafter"] != _PLAIN]
    if not rows:
        return
    known = ("drafter", "temperature", "measure", "tokens_per_s", "over_plain", "same_text")
    categories = [key for key in rows[0] if key not in known]
    lengths = [[row[category] for category in categories] for row in rows]
    size = (2.6 + 0.55 * len(categories), 1.6 + 0.32 * len(rows))
    figure = new_figure(*size)
    axes = figure.subplots()
    image = axes.imshow(lengths, aspect="auto", vmin=1.0)
    for y, row in enumerate(lengths):
        for x, value in enumerate(row):
            dark = value < (1 + max(map(max, lengths))) / 2
            axes.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axes.set_xticks(range(len(categories)), categories, rotation=45, ha="right", fontsize=7)
    axes.set_yticks(range(len(rows)), [f"{r['drafter']}, T={r['temperature']:g}" for r in rows], fontsize=7)
    figure.colorbar(image, label="accept length")
    report.save(figure)
