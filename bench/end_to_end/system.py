"""The whole system against `transformers` generate, on the same weights, prompts and limits, alternating in one run.

Rows: drafter x concurrency. The system is started by `outrider serve` as a user would start it, and asked over REST;
`transformers` gets all cores and no HTTP. Every text is compared with the plain system's, which it must equal.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import struct
import sys
from pathlib import Path
from typing import Any

from bench.harness.flags import whole
from bench.harness.processes import output_of
from bench.harness.prompts import read_prompts
from bench.harness.report import Report
from bench.serve.outrider_system import ask, new_tokens, served, speculation
from outrider.checkpoints.checkpoint import resolve, weight_files
from outrider.drafts import has_bundled_head
from services.target.kernels.cpu.bandwidth import read_bandwidth

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
WARM_UP = ["Say hello.", "Count to ten."]
DRAFTERS = {
    "none": ["--speculative-algorithm", "NONE"],
    "NGRAM": ["--speculative-algorithm", "NGRAM"],
    "EAGLE3": ["--speculative-algorithm", "EAGLE3"],
    "EAGLE3 beside NGRAM": ["--speculative-algorithm", "EAGLE3", "--speculative-ngram-beside"],
    "STANDALONE (self)": ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "{model}"],
}


def drafters_for(model: str) -> dict[str, list[str]]:
    """Those of the drafters that a model has."""
    return {name: flags for name, flags in DRAFTERS.items() if has_bundled_head(model) or "EAGLE3" not in name}


def prompts(count: int) -> list[str]:
    """The first prompts of the file."""
    return [prompt.turns[0] for prompt in read_prompts(PROMPTS)[:count]]


def transformers_generate(model: str, dtype: str, texts: list[str], max_tokens: int) -> tuple[float, int]:
    """Greedy `generate`, one prompt at a time, in a process of its own. Returns seconds and new tokens.

    Raises BenchError if it fails.
    """
    command = [sys.executable, "-m", "bench.end_to_end.plain_transformers", model, dtype, str(max_tokens)]
    facts = json.loads(output_of(command, json.dumps(texts)).splitlines()[-1])
    return facts["seconds"], facts["tokens"]


def floor(folder: Path, dtype: str) -> str:
    """The least time of a plain step: every weight read once."""
    tensors = [tensor for file in weight_files(folder) for tensor in tensor_headers(file).values()]
    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}
    sizes = {"F32": 4, "BF16": 2, "F16": 2}
    size = sum(math.prod(tensor["shape"]) * itemsize.get(dtype, sizes[tensor["dtype"]]) for tensor in tensors)
    bandwidth = read_bandwidth(len(os.sched_getaffinity(0)))
    return (
        f"floor of a plain step: {size / 1e6:.0f} MB of weights at {bandwidth / 1e9:.1f} GB/s, "
        f"{1e3 * size / bandwidth:.1f} ms, or {bandwidth / size:.0f} tokens a second and session"
    )


def tensor_headers(file: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors."""
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        headers: dict[str, Any] = json.loads(stream.read(size))
    headers.pop("__metadata__", None)
    return headers


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/system.*."""
    parser = argparse.ArgumentParser(prog="outrider bench system", description=__doc__)
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--dtype", default="auto", help="of Outrider's target; auto is the checkpoint's own on a CPU")
    parser.add_argument("--transformers-dtype", default="float32", help="on CPUs the faster one there")
    parser.add_argument("--prompts", type=whole, default=12)
    parser.add_argument("--max-tokens", type=whole, default=128)
    parser.add_argument("--concurrency", type=whole, nargs="+", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    args = parser.parse_args(argv)
    model, folder = args.model_path, resolve(args.model_path)
    texts = prompts(args.prompts)
    report = Report("system", "Whole system against transformers generate: new tokens per second")
    report.notes = [
        f"{folder.name}; Outrider: {args.dtype}, transformers: {args.transformers_dtype}",
        f"{len(texts)} prompts of bench/prompts.jsonl, at most {args.max_tokens} new tokens each",
        "ratio: tokens per second over those of `transformers` generate (one prompt at a time, all cores)",
        "same text: answers equal to those of the same system without a drafter, same seed",
        "self: the target's own weights as its draft; as dear as the target, it shows what coupling does",
        "EAGLE3: the head that comes along for the model",
    ]
    report.notes.append(floor(folder, args.dtype))
    seconds, tokens = transformers_generate(str(folder), args.transformers_dtype, texts, args.max_tokens)
    base = tokens / seconds
    report.add(system="transformers generate", temperature=0.0, concurrency=1, tokens_per_s=base, ratio=1.0)
    plain: dict[tuple[int, float], list[str]] = {}
    cells = list(itertools.product(args.temperature, args.concurrency))
    for temperature, concurrency in cells:
        for name, flags in drafters_for(model).items():
            # A fresh system for each cell: an n-gram drafter must not have seen the texts before.
            with served(model, flags, args.dtype) as url:
                asyncio.run(ask(url, [[text] for text in WARM_UP], 2, {"temperature": 0, "max_tokens": 24}))
                body = {"temperature": temperature, "max_tokens": args.max_tokens}
                seconds, turns = asyncio.run(ask(url, [[text] for text in texts], concurrency, body))
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
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    names = [f"{r['system']}, T={r['temperature']:g}, {r['concurrency']} at once" for r in report.rows][::-1]
    bars = axes.barh(names, [r["tokens_per_s"] for r in report.rows][::-1], color="tab:blue")
    axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
    axes.set(xlabel="new tokens per second")
    axes.margins(x=0.08)
    axes.tick_params(axis="y", labelsize=7)
    report.save(figure)
