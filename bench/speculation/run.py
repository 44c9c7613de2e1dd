"""Which flags of speculation are best on this machine, for this model and these prompts, load by load.

Every setting (a drafter with trees that adapt, or with an explicit tree) is started as a system of its own beside one
that decodes plainly. The two take turns over parts of the prompts, so that a machine that is now faster and now slower
is so for both; a setting's figure is its ratio over plain decoding, with a confidence interval over the rounds. At the
end stand the flags to serve with, and whether trees that adapt beat the best explicit one. --resume goes on with what
an earlier call of the same flags has measured, by the same code on the same machine.
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
from bench.harness.flags import whole
from bench.harness.prompts import Prompt, read_prompts, rounds_of, sample
from bench.harness.report import line_of
from bench.serve.client import Target
from bench.serve.outrider_system import served
from bench.speculation.page import Page
from bench.speculation.rounds import Cell, facts_of, take_turns
from bench.speculation.settings import PLAIN, Setting, grid, named
from outrider.drafts import has_bundled_head

# Of a model, flags, a dtype and a number of requests at a time: a system's address while the context lasts.
Serve = Callable[[str, Sequence[str], str, int], AbstractContextManager[str]]


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        prog="outrider bench speculation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("prompts", type=Path, help="a file as of `outrider bench serve`")
    made.add_argument("--model-path", default="default")
    made.add_argument("--dtype", default="auto", help="of the target")
    made.add_argument("--flags", type=shlex.split, default=[], help="further flags of every system, as one word; two "
                      "run at a time, which on a GPU must share its memory (--mem-fraction-static)")  # fmt: skip
    made.add_argument("--drafters", nargs="*", metavar="ALGORITHM", help="NGRAM, EAGLE3, STANDALONE, ...; with +NGRAM "
                      "behind it beside n-grams; by default NGRAM, and EAGLE3 where a head is known")  # fmt: skip
    made.add_argument("--draft-model-path", help="checkpoint of the drafters that have a model")
    made.add_argument("--num-steps", type=int, nargs="+", default=[1, 3, 5], help="depths of explicit trees")
    made.add_argument("--eagle-topk", type=int, nargs="+", default=[1, 4], help="their breadths")
    made.add_argument("--num-draft-tokens", type=int, nargs="+", default=[4, 8, 16], help="rows they verify in a step")
    made.add_argument("--setting", type=_setting, action="append", default=[], metavar="NAME=FLAGS",
                      help="a further setting, by flags of `outrider serve`")  # fmt: skip
    made.add_argument("--num-prompts", type=whole, help="of all rounds, of categories in turns; by default all")
    made.add_argument("--turns", type=whole, default=1, help="turns of a conversation at most (default: %(default)s)")
    made.add_argument("--max-tokens", type=whole, default=128, help="of an answer (default: %(default)s)")
    made.add_argument("--ignore-eos", action="store_true", help="answers go on to their greatest length")
    made.add_argument("--concurrency", type=whole, nargs="+", default=[1, 8])
    made.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    made.add_argument("--rounds", type=int, default=6, help="parts of the prompts, 2 or more (default: %(default)s)")
    made.add_argument("--seed", type=int, default=0, help="of the prompts' order")
    made.add_argument("--resume", action="store_true", help="keep the last run's rows; measure what they lack")
    return made


def _setting(text: str) -> Setting:
    try:
        return named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """What is compared."""
    drafters = args.drafters
    if drafters is None:
        drafters = ["NGRAM", *(["EAGLE3"] if has_bundled_head(args.model_path) else [])]
    made = grid(drafters, args.num_steps, args.eagle_topk, args.num_draft_tokens, args.draft_model_path)
    return [*made, *args.setting]


def parts_of(args: argparse.Namespace) -> list[list[Prompt]]:
    """The prompts of each round; none comes twice, for a drafter would know its answer. Raises ValueError, OSError."""
    there = sample(read_prompts(args.prompts), None, args.seed)
    chosen = [prompt._replace(turns=prompt.turns[: args.turns]) for prompt in there[: args.num_prompts]]
    if args.rounds < 2:
        raise ValueError("--rounds: one round says nothing of the spread; ask for 2 or more")
    parts = rounds_of(chosen, args.rounds)
    most = max(args.concurrency)
    if len(parts[0]) < most:
        raise ValueError(
            f"{len(chosen)} prompts in {args.rounds} rounds are {len(parts[0])} each, too few for {most} at a time; "
            "name a file with more of them, or less --rounds or --concurrency"
        )
    return parts


def main(argv: list[str], serve: Serve = served) -> int:
    """Measure, and write docs/benchmarks/speculation.*. Returns 1 if no setting could be measured."""
    flags = parser()
    args = flags.parse_args(argv)
    try:
        parts = parts_of(args)
        page = Page(args, len(parts[0]))
    except (OSError, ValueError) as error:
        flags.error(str(error))
    missing = [setting for setting in settings_of(args) if not page.has(setting)]
    if missing:
        try:
            with serve(args.model_path, [*PLAIN.flags, *args.flags], args.dtype, max(args.concurrency)) as plain:
                for number, setting in enumerate(missing, start=1):
                    title = f"{number}/{len(missing)} {setting.name}"
                    _add(page, setting, partial(_measure, setting, plain, parts, args, serve, title))
        except BenchError as error:
            print(f"outrider bench speculation: error: {error}", file=sys.stderr)
    page.write()
    for title, rows in page.report.more:
        print(f"\n{title}")
        for row in rows:
            print(f"  {line_of(row)}")
    return 0 if page.report.rows else 1


def _add(page: Page, setting: Setting, measure: Callable[[], list[dict[str, Any]]]) -> None:
    """A setting's rows, or a note of why there are none; what is known so far is written at once."""
    try:
        for row in measure():
            page.report.add(**row)
    except BenchError as error:
        page.report.notes.append(f"{setting.name}: not measured: {error}")
        print(page.report.notes[-1], file=sys.stderr)
    page.write()


def _measure(
    setting: Setting,
    plain: str,
    parts: Sequence[Sequence[Prompt]],
    args: argparse.Namespace,
    serve: Serve,
    title: str,
) -> list[dict[str, Any]]:
    """The rows of a setting, at every load. Raises BenchError."""
    cells = [Cell(t, c) for t in args.temperature for c in args.concurrency]
    body = {"max_tokens": args.max_tokens} | ({"ignore_eos": True} if args.ignore_eos else {})
    rows = []
    with Progress(console=Console(stderr=True)) as progress, ExitStack() as stack:
        bar = progress.add_task(f"{title}, starting", total=2 * len(parts) * len(cells))
        flags = [*setting.flags, *args.flags]
        url = stack.enter_context(serve(args.model_path, flags, args.dtype, max(args.concurrency)))
        progress.update(bar, description=title)
        own, other = (Target(address, body=body) for address in (url, plain))
        for cell in cells:
            pairs = uvloop.run(take_turns(own, other, parts, cell, lambda: progress.advance(bar)))
            facts = {"setting": setting.name, "drafter": setting.drafter, "kind": setting.kind}
            facts |= {"flags": shlex.join(setting.flags), **cell._asdict()}
            rows.append(facts | facts_of(pairs))
    return rows
