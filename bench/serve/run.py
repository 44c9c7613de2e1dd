"""Load generator for OpenAI-style servers: Outrider, vLLM, SGLang, llama-server and others.

Prompts are read from a file (JSON lines with "turns" or "prompt" and an optional "category", as in Spec-Bench and
MT-bench, or ShareGPT's JSON) or consist of random words (--input-len, --output-len). Without --request-rate, the load
is closed-loop: --concurrency conversations run at a time. With it, conversations start at random times, independent of
the server's progress. Answers are streamed. Speculation figures are shown if the server reports them in its answers or
on /metrics.

TTFT ends with the first piece of text or of a tool call. TPOT is the time from there to the last chunk, including the
one with the finish reason, divided by the tokens after the first. With several choices per request (n in --extra-body),
each has its own time, and a conversation continues from the first. Tokens that a server counts but does not send, such
as hidden reasoning, lengthen TTFT and shorten TPOT.
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
from bench.harness.flags import fraction, json_object, non_negative_int, positive_float, positive_int, server_url
from bench.harness.prompts import Prompt, read_prompts, sample, synthetic
from bench.harness.report import chosen_folder
from bench.serve import load, output, server_metrics
from bench.serve.client import Client, Target, root_of
from bench.serve.metrics import LIMITS, Speculation, by_category, seconds_of, summarize
from bench.serve.outcome import Outcome

_DEFAULT_COUNT = 100


def parser() -> argparse.ArgumentParser:
    """The command-line flags."""
    made = argparse.ArgumentParser(
        prog="outrider bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    to = made.add_argument_group("the server")
    to.add_argument("--base-url", type=server_url, default="http://127.0.0.1:30000",
                    help="with or without /v1 (default: %(default)s)")  # fmt: skip
    to.add_argument("--model", help="model name (default: the first one of /v1/models)")
    to.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="API (default: %(default)s)")
    to.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="API key (default: $OPENAI_API_KEY)")
    to.add_argument(
        "--header", type=_header, action="append", default=[], metavar="NAME:VALUE", help="additional HTTP header"
    )
    to.add_argument("--timeout", type=positive_float, default=600.0,
                    help="time limit of an answer in seconds (default: %(default)g)")  # fmt: skip
    what = made.add_argument_group("requests")
    what.add_argument("--prompts", type=Path, help="file of prompts (default: synthetic prompts of random words)")
    what.add_argument("--num-prompts", type=positive_int, help="number of prompts, categories interleaved (default: "
                      f"all of a file, {_DEFAULT_COUNT} synthetic ones)")  # fmt: skip
    what.add_argument("--turns", type=positive_int, default=1, help="maximum turns of a conversation (default: 1)")
    what.add_argument("--input-len", type=positive_int, default=256,
                      help="words of a synthetic prompt (default: %(default)s)")  # fmt: skip
    what.add_argument("--output-len", type=positive_int, default=128,
                      help="exact tokens of an answer to a synthetic prompt (default: %(default)s)")  # fmt: skip
    what.add_argument("--range-ratio", type=fraction, default=0.0,
                      help="relative spread of these lengths, which are uniform within 1 +- RATIO")  # fmt: skip
    what.add_argument("--max-tokens", type=positive_int, default=256,
                      help="maximum tokens of an answer to a prompt of a file (default: %(default)s)")  # fmt: skip
    what.add_argument("--reply-lengths", action="store_true", help="generate answers of the length of the reference "
                      "answers in a ShareGPT file, estimated at four characters per token")  # fmt: skip
    what.add_argument("--ignore-eos", action="store_true", help="generate every answer to its maximum length")
    what.add_argument("--temperature", type=float, default=0.0)
    what.add_argument(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="additional fields of every request; null removes a field that the server rejects, such as ignore_eos",
    )
    what.add_argument("--no-stream", action="store_true", help="do not stream; the only latency is that of the whole "
                      "answer")  # fmt: skip
    what.add_argument("--seed", type=non_negative_int, default=0,
                      help="seed of the order of prompts, of arrivals and of requests (default: 0)")  # fmt: skip
    when = made.add_argument_group("schedule")
    when.add_argument("--concurrency", type=positive_int, help="concurrent conversations (default: 1); with "
                      "--request-rate their maximum (default: none)")  # fmt: skip
    when.add_argument("--request-rate", type=positive_float, help="arrivals of conversations per second")
    when.add_argument("--burstiness", type=positive_float, default=1.0, help="burstiness of arrivals: 1 is Poisson, "
                      "below is burstier, above more even, inf constant (default: 1)")  # fmt: skip
    when.add_argument("--warmup", type=int, default=2, help="synthetic requests before the load (default: 2)")
    out = made.add_argument_group("output", "--output FOLDER writes both files into a folder")
    out.add_argument("--goodput", nargs="+", type=_limit, metavar="NAME:MS", help="count the requests within limits of "
                     f"{', '.join(LIMITS)} in milliseconds")  # fmt: skip
    out.add_argument("--json", type=Path, help="write all figures, and an object per request, to a JSON file")
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
    return name, positive_float(value) / 1e3


def prompts_of(args: argparse.Namespace) -> list[Prompt]:
    """The prompts that the flags select. Raises ValueError, OSError."""
    if args.turns > 1 and (args.prompts is None or args.endpoint != "chat"):
        raise ValueError("--turns: conversations of several turns need a file (--prompts) and --endpoint chat")
    if args.prompts is None:
        count = args.num_prompts or _DEFAULT_COUNT
        return synthetic(count, args.input_len, args.output_len, args.range_ratio, args.seed)
    available = read_prompts(args.prompts)
    if args.reply_lengths and not all(prompt.lengths for prompt in available):
        raise ValueError(f"--reply-lengths: {args.prompts} has prompts without answers")
    if args.num_prompts and args.num_prompts > len(available) > 0:
        warning = f"{args.prompts} has {len(available)} prompts, which repeat; servers may have cached the repetitions"
        print(warning, file=sys.stderr)
    return [
        Prompt(prompt.category, prompt.turns[: args.turns], prompt.lengths if args.reply_lengths else ())
        for prompt in sample(available, args.num_prompts, args.seed)
    ]


def target_of(args: argparse.Namespace) -> Target:
    """The server and request fields that the flags select."""
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
    """Run the load. Returns the target with its model name, the outcomes, and speculation by the server's metrics.

    Raises BenchError if the server is unreachable or has no model.
    """
    async with Client(target) as client:
        if not target.model:
            target = replace(target, model=await _first_model(client))
        if warmup > 0:
            warm = await load.warm_up(target, warmup, min(warmup, plan.concurrency or warmup), plan.seed)
            if failed := [o for o in warm if o.error]:
                console.print(f"warm-up: {failed[0].error}: {failed[0].detail}", style="yellow", markup=False)
        before = server_metrics.read(await client.get("/metrics"))
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
        after = server_metrics.read(await client.get("/metrics"))
    return target, outcomes, server_metrics.speculation(before, after)


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
    """Run the load and print its figures. Returns 1 if no request succeeded."""
    flags = parser()
    args = flags.parse_args(argv)
    folder = chosen_folder()
    json_file, picture = args.json or (folder and folder / "serve.json"), args.plot or (folder and folder / "serve.png")
    try:
        prompts = prompts_of(args)
        output.check(json_file, picture)
    except (OSError, ValueError) as error:
        flags.error(str(error))
    target = target_of(args)
    if not target.body.get("stream", True) and "tpot" in dict(args.goodput or ()):
        flags.error("--goodput: answers without streaming (--no-stream) have no time per output token (tpot)")
    if not prompts:
        flags.error(f"--prompts: there are no prompts in {args.prompts}")
    concurrency = args.concurrency or (None if args.request_rate else 1)
    plan = load.Plan(concurrency, args.request_rate, args.burstiness, args.seed)
    # A pipe has no width of its own: 120 columns hold the widest table.
    console, progress = Console(width=None if sys.stdout.isatty() else 120), Console(stderr=True)
    try:
        work = measure(target, prompts, plan, args.warmup, progress)
        target, outcomes, counters = uvloop.run(work)
    except BenchError as error:
        print(f"outrider bench serve: error: {error}", file=sys.stderr)
        return 1
    seconds = seconds_of(outcomes)
    summary = summarize(outcomes, seconds, dict(args.goodput) if args.goodput else None)
    categories = by_category(outcomes, seconds)
    output.print_tables(console, summary, categories, outcomes, counters)
    parameters = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    parameters |= {"model": target.model, "concurrency": concurrency, "api_key": None, "header": len(args.header)}
    if json_file is not None:
        output.write_json(json_file, parameters, summary, categories, outcomes, counters)
    if picture is not None:
        output.plot(picture, f"{target.model} at {target.base_url}", outcomes)
    return 0 if summary.requests else 1
