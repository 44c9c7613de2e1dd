"""Throughput of the whole system against `transformers` generate, on equal weights, prompts and limits, in one run.

A row is a drafter at a concurrency and temperature. The system is started by `outrider serve` as a user starts it, and
called over REST; `transformers` has all cores and no HTTP. Each answer is compared with that of the same system without
a drafter, which it must equal.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import sys
from pathlib import Path

from bench.harness.flags import positive_int
from bench.harness.processes import output_of
from bench.harness.prompts import BUNDLED_PROMPTS, read_prompts
from bench.harness.report import Report, new_figure
from bench.serve.outrider_system import generate, new_tokens, served, speculation
from outrider.checkpoints.checkpoint import resolve, weight_files
from outrider.checkpoints.headers import tensor_headers
from outrider.drafts import has_bundled_head
from services.target.kernels.cpu.bandwidth import read_bandwidth

WARM_UP = ["Say hello.", "Count to ten."]
DRAFTERS = {
    "none": ["--speculative-algorithm", "NONE"],
    "NGRAM": ["--speculative-algorithm", "NGRAM"],
    "EAGLE3": ["--speculative-algorithm", "EAGLE3"],
    "EAGLE3 + NGRAM": ["--speculative-algorithm", "EAGLE3", "--speculative-ngram-beside"],
    "STANDALONE (self)": ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "{model}"],
}


def drafters_for(model: str) -> dict[str, list[str]]:
    """The drafters that a model can use."""
    return {name: flags for name, flags in DRAFTERS.items() if has_bundled_head(model) or "EAGLE3" not in name}


def prompts(count: int) -> list[str]:
    """The first turns of the first bundled prompts."""
    return [prompt.turns[0] for prompt in read_prompts(BUNDLED_PROMPTS)[:count]]


def transformers_generate(model: str, dtype: str, texts: list[str], max_tokens: int) -> tuple[float, int]:
    """Greedy `generate`, one prompt at a time, in a separate process. Returns seconds and new tokens.

    Raises BenchError if it fails.
    """
    command = [sys.executable, "-m", "bench.end_to_end.plain_transformers", model, dtype, str(max_tokens)]
    facts = json.loads(output_of(command, json.dumps(texts)).splitlines()[-1])
    return facts["seconds"], facts["tokens"]


def floor(folder: Path, dtype: str) -> str:
    """The floor of a plain decoding step, as a note: the time to read every weight once."""
    tensors = [tensor for file in weight_files(folder) for tensor in tensor_headers(file).values()]
    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}
    sizes = {"F32": 4, "BF16": 2, "F16": 2}
    size = sum(math.prod(tensor.shape) * itemsize.get(dtype, sizes[tensor.dtype]) for tensor in tensors)
    bandwidth = read_bandwidth(len(os.sched_getaffinity(0)))
    return (
        f"floor of a plain step: {size / 1e6:.0f} MB of weights at {bandwidth / 1e9:.1f} GB/s, "
        f"{1e3 * size / bandwidth:.1f} ms, or {bandwidth / size:.0f} tokens/s per session"
    )


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/system.*."""
    parser = argparse.ArgumentParser(prog="outrider bench system", description=__doc__)
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--dtype", default="auto", help="number format of Outrider's target; auto is the checkpoint's")
    parser.add_argument("--transformers-dtype", default="float32", help="number format of transformers; float32 is its "
                        "fastest on most CPUs")  # fmt: skip
    parser.add_argument("--prompts", type=positive_int, default=12, help="number of bundled prompts")
    parser.add_argument("--max-tokens", type=positive_int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--concurrency", type=positive_int, nargs="+", default=[1, 8], help="concurrent requests")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    args = parser.parse_args(argv)
    model, folder = args.model_path, resolve(args.model_path)
    texts = prompts(args.prompts)
    report = Report("system", "Throughput of the whole system against transformers generate")
    report.notes = [
        f"{folder.name}; Outrider: {args.dtype}, transformers: {args.transformers_dtype}",
        f"{len(texts)} prompts of bench/prompts.jsonl, at most {args.max_tokens} new tokens each",
        "ratio: speedup in tokens/s over `transformers` generate (one prompt at a time, all cores)",
        "same text: answers equal to those of the same system without a drafter, same seed",
        "self: the target's own weights as the draft model; no speedup, but it shows the effect of coupled sampling",
        "EAGLE3: the bundled head of the model",
    ]
    report.notes.append(floor(folder, args.dtype))
    seconds, tokens = transformers_generate(str(folder), args.transformers_dtype, texts, args.max_tokens)
    base = tokens / seconds
    report.add(system="transformers generate", temperature=0.0, concurrency=1, tokens_per_s=base, ratio=1.0)
    plain: dict[tuple[int, float], list[str]] = {}
    cells = list(itertools.product(args.temperature, args.concurrency))
    for temperature, concurrency in cells:
        for name, flags in drafters_for(model).items():
            # A new system for each cell: an n-gram drafter must not have seen the texts before.
            with served(model, flags, args.dtype) as url:
                asyncio.run(generate(url, [[text] for text in WARM_UP], 2, {"temperature": 0, "max_tokens": 24}))
                body = {"temperature": temperature, "max_tokens": args.max_tokens}
                seconds, turns = asyncio.run(generate(url, [[text] for text in texts], concurrency, body))
            answers = [answer for (answer,) in turns]
            contents = [answer.text for answer in answers]
            reference = plain.setdefault((concurrency, temperature), contents)
            same = sum(a == b for a, b in zip(contents, reference, strict=True))
            report.add(
                system=f"outrider, {name}",
                temperature=temperature,
                concurrency=concurrency,
                tokens_per_s=new_tokens(answers) / seconds,
                ratio=new_tokens(answers) / seconds / base,
                **speculation(answers),
                same_text=f"{same}/{len(texts)}",
            )
    seconds, tokens = transformers_generate(str(folder), args.transformers_dtype, texts, args.max_tokens)
    report.add(system="transformers generate, again", temperature=0.0, concurrency=1, tokens_per_s=tokens / seconds,
               ratio=tokens / seconds / base)  # fmt: skip
    _plot(report)
    report.write()


def _plot(report: Report) -> None:
    figure = new_figure(7.2, 3.8)
    axes = figure.subplots()
    names = [f"{r['system']}, T={r['temperature']:g}, {r['concurrency']} concurrent" for r in report.rows][::-1]
    bars = axes.barh(names, [r["tokens_per_s"] for r in report.rows][::-1], color="tab:blue")
    axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
    axes.set(xlabel="throughput, tokens/s")
    axes.margins(x=0.08)
    axes.tick_params(axis="y", labelsize=7)
    report.save(figure)
