"""Our system beside others that are installed, on the same weights, prompts and limits, prompt by prompt in turns.

All peers are started first, and each prompt goes to one after the other, in an order that is drawn anew each time, so
that the machine's moods cancel; a ratio is taken prompt by prompt. What a peer needs is named by flags; those without
are left out. Number formats are the peers' own: the floor of each is its weights at the bandwidth of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from rich.progress import Progress

from bench.end_to_end.system import PROMPTS
from bench.harness.flags import prompts_in, whole
from bench.harness.prompts import first_of_each, sample
from bench.harness.report import Report
from bench.peers import servers
from bench.peers.base import Facts, Peer, Reply
from bench.peers.figures import Rates, Replies, median_and_quartiles, ratios, same_texts
from bench.peers.workers import Worker
from outrider.checkpoints.checkpoint import resolve, weight_files
from services.target.kernels.cpu.bandwidth import read_bandwidth

_OURS = {
    "bf16": ("bfloat16", "", "--dtype bfloat16 --speculative-algorithm NONE"),
    "bf16, AUTO": ("bfloat16", "AUTO", "--dtype bfloat16"),
    "int8": ("int8", "", "--quantization int8 --speculative-algorithm NONE"),
    "int8, AUTO": ("int8", "AUTO", "--quantization int8"),
    "int4": ("int4", "", "--quantization int4 --speculative-algorithm NONE"),
    "int4, AUTO": ("int4", "AUTO", "--quantization int4"),
}
_LLAMA_DRAFTS = {"": [], "n-gram": ["--spec-type", "ngram-simple"]}
_VLLM_DRAFTS = {
    "": [],
    "n-gram": ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'],
}
_REST = 0.5  # seconds before a peer is asked: threads of the one before may spin for a while behind their last work
_OF_BF16 = {"bfloat16": 1.0, "float32": 2.0, "int8": 0.5, "int4": 0.35}  # int4: 5 bits, the head 8


def catalogue(args: argparse.Namespace, folder: Path) -> Iterator[Peer]:
    """The peers that flags name. folder: for their logs."""
    model, threads = resolve(args.model_path), len(os.sched_getaffinity(0))
    size = sum(file.stat().st_size for file in weight_files(model))
    common = ["--model-path", args.model_path, "--disable-draft-self-test", "--max-running-requests", "8"]
    for name in args.outrider:
        weights, speculation, flags = _OURS[name]
        facts = Facts(f"outrider {name}", "outrider", weights, speculation, int(size * _OF_BF16[weights]))
        yield servers.outrider(facts, [*common, *shlex.split(flags)], folder)
    for mode in args.transformers:
        speculation = "" if mode == "plain" else mode.partition(":")[0]
        facts = Facts(f"transformers {mode}", "transformers", args.transformers_dtype, speculation,
                      int(size * _OF_BF16[args.transformers_dtype]), batched=False)  # fmt: skip
        arguments = [str(model), args.transformers_dtype, str(threads), mode]
        yield Worker(facts, sys.executable, "transformers_worker.py", arguments, folder)
    for label, file in map(_named, args.llama_model):
        for speculation, flags in _LLAMA_DRAFTS.items():
            facts = Facts(_name("llama.cpp", label, speculation), "llama.cpp", label, speculation, file.stat().st_size)
            yield servers.llama_server(facts, args.llama_server, file, flags, threads, folder)
    for label, where in map(_named, args.openvino_model):
        for speculation, mode in (("", "plain"), ("lookup", "lookup")):
            weights = sum(f.stat().st_size for f in where.glob("openvino_model.bin"))
            facts = Facts(_name("OpenVINO", label, speculation), "OpenVINO", label, speculation, weights,
                          batched=mode == "plain")  # fmt: skip
            yield Worker(facts, args.openvino_python, "openvino_worker.py", [str(where), str(threads), mode], folder)
    if args.vllm:
        for speculation, flags in _VLLM_DRAFTS.items():
            facts = Facts(_name("vLLM", "bf16", speculation), "vLLM", "bfloat16", speculation, size)
            yield servers.vllm(facts, args.vllm, model, flags, threads, folder)


def _name(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _named(text: str) -> tuple[str, Path]:
    label, _, file = text.partition("=")
    return label, Path(file)


def main(argv: Sequence[str]) -> None:
    """Run the benchmark and write docs/benchmarks/peers.* and peers-ratios.*."""
    args = _arguments(argv)
    alone = first_of_each(args.asked, args.limit)
    texts = [prompt.turns[0] for prompt in alone]
    fresh = [prompt for prompt in args.asked if prompt not in alone]
    chosen = sample(fresh or alone, args.together * args.rounds, seed=0)
    groups = [[prompt.turns[0] for prompt in chosen[i :: args.rounds]] for i in range(args.rounds)]
    report = Report("peers", "Our system beside others: greedy, one request at a time, and several at once")
    table = Report("peers-ratios", "Our tokens per second over others', prompt by prompt")
    with tempfile.TemporaryDirectory(prefix="outrider-") as logs, contextlib.ExitStack() as stack:
        peers = list(catalogue(args, Path(logs)))
        for peer in peers:
            print(f"starting {peer.facts.name}", flush=True)
            stack.enter_context(peer.running())
            peer.ask(["Say hello."], 16)
        bandwidth = read_bandwidth(len(os.sched_getaffinity(0)))
        replies, together = ask_in_turns(peers, texts, groups, args.new_tokens)
        bandwidth = (bandwidth + read_bandwidth(len(os.sched_getaffinity(0)))) / 2
    facts = [peer.facts for peer in peers]
    add_rates(report, facts, replies, together, args.together, bandwidth)
    add_ratios(table, facts, replies, together, args.together)
    report.notes = _notes(args, len(texts), bandwidth, fresh=len(fresh) >= len(chosen))
    table.notes = [
        "median and quartiles over prompts; with a number: so many requests at once, over groups of them; - where the "
        "other one would answer them one after the other",
        *report.notes[:1],
    ]
    _plot(report, f"{args.together} at once, tokens/s")
    report.write()
    table.write()


def add_rates(
    report: Report, peers: Sequence[Facts], replies: Replies, together: Rates, count: int, bandwidth: float
) -> None:
    """A row a peer. together: of groups of `count` requests at once; bandwidth: of the machine, in bytes a second."""
    same = same_texts(peers, replies)
    for one in peers:
        rate, low, high = median_and_quartiles([r.rate for r in replies[one.name] if r.tokens > 1])
        report.add(**{
            "peer": one.name, "weights": one.weights, "drafts": one.speculation or "-", "tokens/s": rate,
            "quartiles": f"{low:.0f}-{high:.0f}", "first token, ms": 1e3 * median(r.first for r in replies[one.name]),
            "floor, tokens/s": bandwidth / one.size, "of floor": rate * one.size / bandwidth,
            f"{count} at once, tokens/s": median(together[one.name]) if one.batched else "-",
            "same text": same.get(one.name, "-"),
        })  # fmt: skip


def add_ratios(report: Report, peers: Sequence[Facts], replies: Replies, together: Rates, count: int) -> None:
    """A row for each of ours, over every other one and over ours without drafts."""
    others = [one for one in peers if one.family != "outrider" or not one.speculation]
    for ours in (one for one in peers if one.family == "outrider"):
        row: dict[str, object] = {"ours": ours.name}
        for other in others:
            row[other.name] = _spread(ratios(replies[ours.name], replies[other.name]))
            pairs = zip(together[ours.name], together[other.name], strict=True) if other.batched else ()
            row[f"{other.name}, {count}"] = _spread([a / b for a, b in pairs])
        report.add(**row)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle, low, high = median_and_quartiles(values)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def ask_in_turns(
    peers: Sequence[Peer], texts: Sequence[str], groups: Sequence[list[str]], new: int
) -> tuple[dict[str, list[Reply]], dict[str, list[float]]]:
    """Every prompt to every peer, alone; then groups at once, to those that answer them at once.

    Returns replies and groups' tokens a second, by peer.
    """
    replies: dict[str, list[Reply]] = {peer.facts.name: [] for peer in peers}
    rates: dict[str, list[float]] = {peer.facts.name: [] for peer in peers}
    batched = [peer for peer in peers if peer.facts.batched]
    order = random.Random(0)
    with Progress() as progress:
        bar = progress.add_task("prompts", total=len(texts) + len(groups))
        for text in texts:
            for peer in order.sample(peers, len(peers)):
                time.sleep(_REST)
                replies[peer.facts.name] += peer.ask([text], new)[1]
            progress.advance(bar)
        for group in groups:
            for peer in order.sample(batched, len(batched)):
                time.sleep(_REST)
                seconds, said = peer.ask(group, new)
                rates[peer.facts.name].append(sum(reply.tokens for reply in said) / seconds)
            progress.advance(bar)
    return replies, rates


def _notes(args: argparse.Namespace, count: int, bandwidth: float, *, fresh: bool) -> list[str]:
    asked = "prompts that nobody was asked before" if fresh else "some prompts were asked before"
    return [
        f"{resolve(args.model_path).name}; first turns of {count} prompts of {args.prompts.name}, at most "
        f"{args.new_tokens} new tokens, ended by the model's end of text; every prompt to all peers in turns",
        "tokens/s: of one request behind its first token, median and quartiles over prompts",
        f"floor: the weights of a step at {bandwidth / 1e9:.1f} GB/s; what drafts may lie above it",
        f"at once: {asked}; same text: answers equal to the same peer's without drafts",
        "servers are asked over HTTP; transformers and OpenVINO answer in their own process; several at once: - where "
        "they would be one after the other, as with transformers and with OpenVINO's lookup",
    ]


def _plot(report: Report, at_once: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = sorted(report.rows, key=lambda row: row["tokens/s"])
    figure, panels = plt.subplots(1, 2, figsize=(9, 0.8 + 0.3 * len(rows)), layout="constrained", sharey=True)
    for panel, column in zip(panels, ("tokens/s", at_once), strict=True):
        colors = ["tab:blue" if row["peer"].startswith("outrider") else "tab:gray" for row in rows]
        known = [row[column] != "-" for row in rows]
        rates = [row[column] if there else 0.0 for row, there in zip(rows, known, strict=True)]
        bars = panel.barh([row["peer"] for row in rows], rates, color=colors)
        labels = [f"{rate:.0f}" if there else "-" for rate, there in zip(rates, known, strict=True)]
        panel.bar_label(bars, labels, padding=2, fontsize=7)
        panel.set(xlabel=column)
        panel.margins(x=0.1)
        panel.tick_params(axis="y", labelsize=7)
    panels[0].plot([row["floor, tokens/s"] for row in rows], range(len(rows)), "k|", markersize=9, label="plain floor")
    panels[0].legend(fontsize=7)
    report.save(figure)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="outrider bench peers", description=__doc__)
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="prompts, as of `bench serve`")
    parser.add_argument("--limit", type=whole, help="prompts of a category; by default all")
    parser.add_argument("--new-tokens", type=whole, default=128)
    parser.add_argument("--together", type=whole, default=8, help="requests at once, behind those that come alone")
    parser.add_argument("--rounds", type=whole, default=5, help="of requests at once")
    parser.add_argument("--outrider", nargs="*", choices=list(_OURS), default=list(_OURS))
    parser.add_argument("--transformers", nargs="*", default=["plain", "lookup"], metavar="MODE",
                        help="plain, lookup, or assisted:FOLDER of a draft model; none leaves it out")  # fmt: skip
    parser.add_argument("--transformers-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--llama-server", default="llama-server", help="llama.cpp's server program")
    parser.add_argument("--llama-model", nargs="*", default=[], metavar="LABEL=FILE", help="GGUF files for it")
    parser.add_argument("--openvino-python", default=sys.executable, help="a Python that has openvino_genai")
    parser.add_argument("--openvino-model", nargs="*", default=[], metavar="LABEL=FOLDER", help="converted models")
    parser.add_argument("--vllm", help="vLLM's program, built for CPUs")
    args = parser.parse_args(argv)
    if args.new_tokens < 2:
        parser.error("--new-tokens: rates are of tokens behind the first one; ask for 2 or more")
    args.asked = prompts_in(parser, args.prompts)
    for mode in args.transformers:
        kind, _, folder = mode.partition(":")
        if mode not in ("plain", "lookup") and not (kind == "assisted" and Path(folder, "config.json").is_file()):
            parser.error(f"--transformers {mode!r} is neither plain nor lookup nor assisted:FOLDER of a model")
    for text in [*args.llama_model, *args.openvino_model]:
        label, equals, file = text.partition("=")
        if not (label and equals and file and Path(file).exists()):
            parser.error(f"{text!r} is not LABEL=PATH of something that exists")
    needed = [args.llama_server] * bool(args.llama_model) + [args.openvino_python] * bool(args.openvino_model)
    for program in [*needed, *([args.vllm] if args.vllm else [])]:
        if shutil.which(program) is None:
            parser.error(f"{program} cannot be run; name it by --llama-server, --openvino-python or --vllm")
    if not (args.outrider or args.transformers or args.llama_model or args.openvino_model or args.vllm):
        parser.error("there is nobody to ask; name one with --outrider, --transformers or another flag")
    return args
