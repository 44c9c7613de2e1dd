"""Load on any OpenAI-style server: Outrider, vLLM, SGLang, llama-server and their like.

Prompts come from a file (JSON lines with "turns" or "prompt" and perhaps "category", as of Spec-Bench and MT-bench, or
ShareGPT's JSON) or are made of random words (--input-len, --output-len). Without --request-rate, --concurrency users
each ask again as soon as they have their answer; with it, conversations begin at random times, whether or not the
server keeps up. Answers are streamed. Speculation is shown where the server tells of it, in its answers or on /metrics.

Time to the first token ends with the first piece of text, or of a call of a tool, that the server sends. Time per
output token is that from there to the last chunk, the one with the finish reason included, over the tokens after the
first; where a request asks for several answers (n in --extra-body), each of them takes its own time, and a conversation
goes on from the first. Tokens that a server counts but hides before the first piece, such as thoughts, make the one
longer and the other too short.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.harness.errors import BenchError
from bench.harness.flags import address, json_object, positive, seed, share, whole
from bench.harness.prompts import Prompt, read_prompts, sample, synthetic
from bench.harness.report import chosen
from bench.serve import counters, load, show
from bench.serve.client import Client, Target, root_of
from bench.serve.measures import LIMITS, Speculation, by_category, seconds_of, summarize
from bench.serve.outcome import Outcome

_DEFAULT_COUNT = 100


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        prog="outrider bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    to = made.add_argument_group("the server")
    to.add_argument("--base-url", type=address, default="http://127.0.0.1:30000",
                    help="with or without /v1 (default: %(default)s)")  # fmt: skip
    to.add_argument("--model", help="by default the first one that /v1/models names")
    to.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    to.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="by default $OPENAI_API_KEY")
    to.add_argument(
        "--header", type=_header, action="append", default=[], metavar="NAME:VALUE", help="a further header"
    )
    to.add_argument("--timeout", type=positive, default=600.0, help="seconds that an answer may take")
    what = made.add_argument_group("what is asked")
    what.add_argument("--prompts", type=Path, help="a file of prompts; without one they are made of random words")
    what.add_argument("--num-prompts", type=whole, help="of a file all by default, categories taking turns; "
                      f"of random words {_DEFAULT_COUNT}")  # fmt: skip
    what.add_argument("--turns", type=whole, default=1, help="turns of each conversation at most (default: 1)")
    what.add_argument("--input-len", type=whole, default=256, help="random words of a prompt (default: 256)")
    what.add_argument("--output-len", type=whole, default=128, help="tokens of its answer, whole ones (default: 128)")
    what.add_argument("--range-ratio", type=share, default=0.0, help="lengths are uniform within 1 +- this ratio")
    what.add_argument("--max-tokens", type=whole, default=256, help="of an answer to a prompt of a file")
    what.add_argument("--reply-lengths", action="store_true", help="whole answers as long as those in a file of "
                      "ShareGPT's form, four characters taken for a token")  # fmt: skip
    what.add_argument("--ignore-eos", action="store_true", help="answers go on to their greatest length")
    what.add_argument("--temperature", type=float, default=0.0)
    what.add_argument(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="further fields of every request; null leaves one out that a server refuses, such as ignore_eos or seed",
    )
    what.add_argument("--no-stream", action="store_true", help="whole answers; only their latency can be told then")
    what.add_argument("--seed", type=seed, default=0, help="of the prompts' order, the arrivals and the requests")
    when = made.add_argument_group("when")
    when.add_argument("--concurrency", type=whole, help="conversations at a time: 1 by default; with --request-rate "
                      "a limit, by default none")  # fmt: skip
    when.add_argument("--request-rate", type=positive, help="conversations that begin in a second")
    when.add_argument(
        "--burstiness", type=positive, default=1.0, help="of arrivals: 1 Poisson, below bursts, above even; or inf"
    )
    when.add_argument("--warmup", type=int, default=2, help="requests before the load, of random words (default: 2)")
    out = made.add_argument_group("what comes out", "--output FOLDER writes both files into a folder")
    out.add_argument("--goodput", nargs="+", type=_limit, metavar="NAME:MS", help="count requests that keep limits of "
                     f"{', '.join(LIMITS)} in milliseconds")  # fmt: skip
    out.add_argument("--json", type=Path, help="write all figures and a line a request to a file")
    out.add_argument("--plot", type=Path, help="write distributions of latencies and throughput over time to a picture")
    return made


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and name.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:VALUE")
    return name.strip(), value.strip()


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in LIMITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:MS with a name of {', '.join(LIMITS)}")
    return name, positive(value) / 1e3


def prompts_of(args: argparse.Namespace) -> list[Prompt]:
    """What the flags ask for. Raises ValueError, OSError."""
    if args.turns > 1 and (args.prompts is None or args.endpoint != "chat"):
        raise ValueError("--turns: conversations are those of a file (--prompts), and held in chats alone (--endpoint)")
    if args.prompts is None:
        count = args.num_prompts or _DEFAULT_COUNT
        return synthetic(count, args.input_len, args.output_len, args.range_ratio, args.seed)
    there = read_prompts(args.prompts)
    if args.reply_lengths and not all(prompt.lengths for prompt in there):
        raise ValueError(f"--reply-lengths: {args.prompts} has prompts without answers")
    if args.num_prompts and args.num_prompts > len(there) > 0:
        again = f"{args.prompts} has {len(there)} prompts, so they come again; servers know the repeated ones"
        print(again, file=sys.stderr)
    return [
        Prompt(prompt.category, prompt.turns[: args.turns], prompt.lengths if args.reply_lengths else ())
        for prompt in sample(there, args.num_prompts, args.seed)
    ]


def target_of(args: argparse.Namespace) -> Target:
    """Whom the flags name."""
    headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    headers |= dict(args.header)
    body: dict[str, Any] = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    if args.ignore_eos or args.reply_lengths or args.prompts is None:
        body["ignore_eos"] = True
    if args.no_stream:
        body["stream"] = False
    body |= args.extra_body
    return Target(root_of(args.base_url), args.endpoint, args.model or "", body, headers, args.timeout)


async def measure(
    target: Target, prompts: Sequence[Prompt], plan: load.Plan, warmup: int, console: Console
) -> tuple[Target, list[Outcome], Speculation | None]:
    """Put a load on. Returns the target with its model's name, what came of it, and what the metrics tell.

    Raises BenchError if the server cannot be reached or has no model.
    """
    async with Client(target) as client:
        if not target.model:
            target = replace(target, model=await _first_model(client))
        if warmup > 0:
            warm = await load.warm_up(target, warmup, min(warmup, plan.concurrency or warmup), plan.seed)
            if failed := [o for o in warm if o.error]:
                console.print(f"warm-up: {failed[0].error}: {failed[0].detail}", style="yellow", markup=False)
        before = counters.read(await client.get("/metrics"))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("requests", total=sum(len(prompt.turns) for prompt in prompts))
            so_far = [0, 0]

            def done(outcome: Outcome) -> None:
                so_far[0] += outcome.output_tokens
                so_far[1] += bool(outcome.error)
                progress.update(bar, advance=1, description=f"{so_far[0]:,} tokens, {so_far[1]} failed")

            outcomes = await load.run(target, prompts, plan, done)
        after = counters.read(await client.get("/metrics"))
    return target, outcomes, counters.speculation(before, after)


async def _first_model(client: Client) -> str:
    try:
        page = await client.page("/v1/models")
    except BenchError as error:
        raise BenchError(f"{client.target.base_url}: {error} (--model names a model)") from error
    try:
        return str(json.loads(page)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{client.target.base_url}/v1/models names no model; --model names one") from error


def main(argv: list[str]) -> int:
    """Put the load on, and show what came of it. Returns 1 if no request succeeded."""
    flags = parser()
    args = flags.parse_args(argv)
    folder = chosen()
    json_file, picture = args.json or (folder and folder / "serve.json"), args.plot or (folder and folder / "serve.png")
    try:
        prompts = prompts_of(args)
        show.check(json_file, picture)
    except (OSError, ValueError) as error:
        flags.error(str(error))
    target = target_of(args)
    if not target.body.get("stream", True) and "tpot" in dict(args.goodput or ()):
        flags.error("--goodput: whole answers (--no-stream) have no time per output token to limit (tpot)")
    if not prompts:
        flags.error(f"--prompts: there is none in {args.prompts}")
    concurrency = args.concurrency or (None if args.request_rate else 1)
    plan = load.Plan(concurrency, args.request_rate, args.burstiness, args.seed)
    # A pipe has no width; wide tables stay whole in it.
    console, progress = Console(width=None if sys.stdout.isatty() else 120), Console(stderr=True)
    try:
        work = measure(target, prompts, plan, args.warmup, progress)
        target, outcomes, told = uvloop.run(work)
    except BenchError as error:
        print(f"outrider bench serve: error: {error}", file=sys.stderr)
        return 1
    seconds = seconds_of(outcomes)
    summary = summarize(outcomes, seconds, dict(args.goodput) if args.goodput else None)
    categories = by_category(outcomes, seconds)
    show.show(console, summary, categories, outcomes, told)
    parameters = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    parameters |= {"model": target.model, "concurrency": concurrency, "api_key": None, "header": len(args.header)}
    if json_file is not None:
        show.write_json(json_file, parameters, summary, categories, outcomes, told)
    if picture is not None:
        show.plot(picture, f"{target.model} at {target.base_url}", outcomes)
    return 0 if summary.requests else 1
