"""Finds the best speculation flags for a machine, a model and a set of prompts, at each load.

Each setting (a drafter with adaptive trees or with an explicit tree) is started as a system beside one with plain
decoding. The two answer parts of the prompts alternately, so that drift of the machine's speed affects both. The result
of a setting is its speedup over plain decoding, with a confidence interval over the rounds. The report ends with the
recommended flags and with a comparison of adaptive trees and the best explicit tree. --resume continues an earlier run
with the same flags, commit and machine.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import Progress

from bench.harness.errors import BenchError
from bench.harness.flags import positive_int
from bench.harness.prompts import Prompt, equal_parts, read_prompts, sample
from bench.harness.report import format_row
from bench.serve.client import Target
from bench.serve.outrider_system import ADMIN_HEADERS, served
from bench.speculation.page import Page
from bench.speculation.paired_rounds import Cell, measured_row, run_pairs
from bench.speculation.settings import PLAIN, Setting, grid, named
from outrider.drafts import has_bundled_head

# Starts a system from model, flags, dtype and maximum of concurrent requests; a context that yields its URL.
Serve = Callable[[str, Sequence[str], str, int], AbstractContextManager[str]]


def parser() -> argparse.ArgumentParser:
    """The command-line flags."""
    made = argparse.ArgumentParser(
        prog="outrider bench speculation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("prompts", type=Path, help="file of prompts, as in `outrider bench serve`")
    made.add_argument("--model-path", default="default")
    made.add_argument("--dtype", default="auto", help="number format of the target")
    made.add_argument("--flags", type=shlex.split, default=[], help="additional flags of every system, as one "
                      "argument; two systems run at a time and share a GPU (--mem-fraction-static)")  # fmt: skip
    made.add_argument("--drafters", nargs="*", metavar="ALGORITHM", help="NGRAM, EAGLE3, STANDALONE, ...; the suffix "
                      "+NGRAM adds the n-gram drafter (default: NGRAM, and EAGLE3 if a head is known)")  # fmt: skip
    made.add_argument("--draft-model-path", help="checkpoint of drafters with a model")
    made.add_argument("--num-steps", type=int, nargs="+", default=[1, 3, 5], help="depths of explicit trees")
    made.add_argument("--eagle-topk", type=int, nargs="+", default=[1, 4], help="children per node of explicit trees")
    made.add_argument("--num-draft-tokens", type=int, nargs="+", default=[4, 8, 16],
                      help="tokens that explicit trees verify per step")  # fmt: skip
    made.add_argument("--setting", type=_setting, action="append", default=[], metavar="NAME=FLAGS",
                      help="additional setting, given by flags of `outrider serve`")  # fmt: skip
    made.add_argument("--baseline", type=_setting, default=PLAIN, metavar="NAME=FLAGS",
                      help="what the settings are compared with, given by flags (default: plain decoding)")  # fmt: skip
    made.add_argument("--num-prompts", type=positive_int, help="prompts of all rounds together, categories "
                      "interleaved (default: all)")  # fmt: skip
    made.add_argument("--turns", type=positive_int, default=1,
                      help="maximum turns of a conversation (default: %(default)s)")  # fmt: skip
    made.add_argument("--max-tokens", type=positive_int, default=128,
                      help="maximum tokens of an answer (default: %(default)s)")  # fmt: skip
    made.add_argument("--ignore-eos", action="store_true", help="generate every answer to its maximum length")
    made.add_argument("--concurrency", type=positive_int, nargs="+", default=[1, 8], help="concurrent conversations")
    made.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    made.add_argument("--rounds", type=int, default=6, help="paired rounds, at least 2 (default: %(default)s)")
    made.add_argument("--seed", type=int, default=0, help="seed of the order of prompts (default: 0)")
    made.add_argument("--resume", action="store_true", help="keep the rows of the last run and measure missing ones")
    return made


def _setting(text: str) -> Setting:
    try:
        return named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """The settings to compare."""
    drafters = args.drafters
    if drafters is None:
        drafters = ["NGRAM", *(["EAGLE3"] if has_bundled_head(args.model_path) else [])]
    made = grid(drafters, args.num_steps, args.eagle_topk, args.num_draft_tokens, args.draft_model_path)
    return [*made, *args.setting]


def prompt_parts(args: argparse.Namespace) -> list[list[Prompt]]:
    """The prompts of each round, without repetition: a drafter would have cached the answer.

    Raises ValueError, OSError.
    """
    available = sample(read_prompts(args.prompts), None, args.seed)
    chosen = [prompt._replace(turns=prompt.turns[: args.turns]) for prompt in available[: args.num_prompts]]
    if args.rounds < 2:
        raise ValueError("--rounds: a single round gives no confidence interval; use 2 or more")
    parts = equal_parts(chosen, args.rounds)
    largest = max(args.concurrency)
    if len(parts[0]) < largest:
        raise ValueError(
            f"{len(chosen)} prompts in {args.rounds} rounds are {len(parts[0])} each, too few for concurrency "
            f"{largest}; use a file with more prompts, or lower --rounds or --concurrency"
        )
    return parts


def main(argv: list[str], serve: Serve = served) -> int:
    """Measure, and write docs/benchmarks/speculation.*. Returns 1 if no setting could be measured."""
    flags = parser()
    args = flags.parse_args(argv)
    try:
        parts = prompt_parts(args)
        page = Page(args, len(parts[0]))
    except (OSError, ValueError) as error:
        flags.error(str(error))
    missing = [setting for setting in settings_of(args) if not page.has(setting)]
    if missing:
        try:
            with serve(
                args.model_path, [*args.baseline.flags, *args.flags], args.dtype, max(args.concurrency)
            ) as baseline:
                for number, setting in enumerate(missing, start=1):
                    title = f"{number}/{len(missing)} {setting.name}"
                    _add(page, setting, partial(_measure, setting, baseline, parts, args, serve, title))
        except BenchError as error:
            print(f"outrider bench speculation: error: {error}", file=sys.stderr)
    page.write()
    for title, rows in page.report.more:
        print(f"\n{title}")
        for row in rows:
            print(f"  {format_row(row)}")
    return 0 if page.report.rows else 1


def _add(page: Page, setting: Setting, measure: Callable[[], list[dict[str, Any]]]) -> None:
    """Add the rows of a setting, or a note with the reason of a failure, and write the page."""
    try:
        for row in measure():
            page.report.add(**row)
    except BenchError as error:
        page.report.notes.append(f"{setting.name}: not measured: {error}")
        print(page.report.notes[-1], file=sys.stderr)
    page.write()


def _measure(
    setting: Setting,
    baseline: str,
    parts: Sequence[Sequence[Prompt]],
    args: argparse.Namespace,
    serve: Serve,
    title: str,
) -> list[dict[str, Any]]:
    """The rows of a setting, one per load. Raises BenchError."""
    cells = [Cell(t, c) for t in args.temperature for c in args.concurrency]
    body = {"max_tokens": args.max_tokens} | ({"ignore_eos": True} if args.ignore_eos else {})
    rows = []
    with Progress(console=Console(stderr=True)) as progress, ExitStack() as stack:
        bar = progress.add_task(f"{title}, starting", total=2 * len(parts) * len(cells))
        flags = [*setting.flags, *args.flags]
        url = stack.enter_context(serve(args.model_path, flags, args.dtype, max(args.concurrency)))
        progress.update(bar, description=title)
        own, other = (Target(address, body=body, headers=ADMIN_HEADERS) for address in (url, baseline))
        for cell in cells:
            pairs = uvloop.run(run_pairs(own, other, parts, cell, lambda: progress.advance(bar)))
            facts = {"setting": setting.name, "drafter": setting.drafter, "kind": setting.kind}
            facts |= {"flags": shlex.join(setting.flags), **cell._asdict()}
            rows.append(facts | measured_row(pairs, args.baseline.name))
    return rows
