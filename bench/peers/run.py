"""Outrider beside other installed inference systems, on equal weights, prompts and limits.

All peers are started first. Each prompt is sent to one peer after another, in random order, so that drift of the
machine's speed cancels; speedups are computed per prompt. Flags give the programs and models of the peers; peers
without them are omitted. Peers use their own number formats: the floor of each is the time to read its weights at the
bandwidth of the machine.
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

from bench.harness.flags import load_prompts, positive_int
from bench.harness.prompts import BUNDLED_PROMPTS, first_per_category, sample
from bench.harness.report import Report, new_figure
from bench.peers import servers
from bench.peers.base import Peer, PeerInfo, Reply
from bench.peers.figures import Rates, Replies, equal_texts, median_and_quartiles, ratios
from bench.peers.workers import Worker
from outrider.checkpoints.checkpoint import resolve, weight_files
from services.target.kernels.cpu.bandwidth import read_bandwidth

_OUTRIDER_CONFIGS = {
    "bf16": ("bfloat16", "", "--dtype bfloat16 --speculative-algorithm NONE"),
    "bf16, AUTO": ("bfloat16", "AUTO", "--dtype bfloat16"),
    "int8": ("int8", "", "--quantization int8 --speculative-algorithm NONE"),
    "int8, AUTO": ("int8", "AUTO", "--quantization int8"),
    "int4": ("int4", "", "--quantization int4 --speculative-algorithm NONE"),
    "int4, AUTO": ("int4", "AUTO", "--quantization int4"),
}
_LLAMA_SPECULATION = {"": [], "n-gram": ["--spec-type", "ngram-simple"]}
_ON_A_FILE = {"": "--speculative-algorithm NONE --self-speculation off", "AUTO": ""}
_VLLM_SPECULATION = {
    "": [],
    "n-gram": ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'],
}
_COMMON_FLAGS = ("--disable-draft-self-test", "--max-running-requests", "8")
PAUSE = 0.5  # seconds before each request: threads of the previous peer may spin for a while after their last work
_SIZE_OVER_BF16 = {"bfloat16": 1.0, "float32": 2.0, "int8": 0.5, "int4": 0.35}  # int4: 5 bits, the head 8


def peers_of(args: argparse.Namespace, folder: Path) -> Iterator[Peer]:
    """The peers that the flags select. folder: for their logs."""
    threads, model, size = len(os.sched_getaffinity(0)), Path(), 0
    if args.outrider or args.transformers or args.vllm:  # the others have files of their own
        model = resolve(args.model_path)
        size = sum(file.stat().st_size for file in weight_files(model))
    common = ["--model-path", args.model_path, *_COMMON_FLAGS]
    for name in args.outrider:
        weights, speculation, flags = _OUTRIDER_CONFIGS[name]
        info = PeerInfo(f"outrider {name}", "outrider", weights, speculation, int(size * _SIZE_OVER_BF16[weights]))
        yield servers.outrider(info, [*common, *shlex.split(flags)], folder)
    yield from _peers_on_a_file(args, threads, folder)
    for mode in args.transformers:
        speculation = "" if mode == "plain" else mode.partition(":")[0]
        info = PeerInfo(f"transformers {mode}", "transformers", args.transformers_dtype, speculation,
                      int(size * _SIZE_OVER_BF16[args.transformers_dtype]), batched=False)  # fmt: skip
        arguments = [str(model), args.transformers_dtype, str(threads), mode]
        yield Worker(info, sys.executable, "transformers_worker.py", arguments, folder)
    for label, file in map(_labelled, args.llama_model):
        for speculation, options in _LLAMA_SPECULATION.items():
            name = _name("llama.cpp", label, speculation)
            info = PeerInfo(name, "llama.cpp", label, speculation, file.stat().st_size)
            yield servers.llama_server(info, args.llama_server, file, options, threads, folder)
    for label, where in map(_labelled, args.openvino_model):
        for speculation, mode in (("", "plain"), ("lookup", "lookup")):
            info = PeerInfo(_name("OpenVINO", label, speculation), "OpenVINO", label, speculation,
                            sum(f.stat().st_size for f in where.glob("openvino_model.bin")),
                            batched=mode == "plain")  # fmt: skip
            yield Worker(info, args.openvino_python, "openvino_worker.py", [str(where), str(threads), mode], folder)
    if args.vllm:
        for speculation, options in _VLLM_SPECULATION.items():
            info = PeerInfo(_name("vLLM", "bf16", speculation), "vLLM", "bfloat16", speculation, size)
            yield servers.vllm(info, args.vllm, model, options, threads, folder)


def _peers_on_a_file(args: argparse.Namespace, threads: int, folder: Path) -> Iterator[Peer]:
    """Outrider and llama.cpp on one GGUF file, plainly and with each one's drafts; with --gguf-draft also with a draft
    model.
    """
    if args.gguf is None:
        return
    size, label = args.gguf.stat().st_size, args.gguf.stem
    ours = {name: shlex.split(flags) for name, flags in _ON_A_FILE.items()}
    theirs = dict(_LLAMA_SPECULATION)
    if args.gguf_draft is not None:
        draft = str(args.gguf_draft)
        ours["STANDALONE"] = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft]
        theirs["draft model"] = ["--model-draft", draft]
    for speculation, flags in ours.items():
        info = PeerInfo(_name("outrider", label, speculation), "outrider", label, speculation, size)
        options = ["--model-path", str(args.gguf), *_COMMON_FLAGS, *flags]
        yield servers.outrider(info, options, folder)
    for speculation, flags in theirs.items():
        info = PeerInfo(_name("llama.cpp", label, speculation), "llama.cpp", label, speculation, size)
        yield servers.llama_server(info, args.llama_server, args.gguf, flags, threads, folder)


def _name(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _labelled(text: str) -> tuple[str, Path]:
    label, _, file = text.partition("=")
    return label, Path(file)


def main(argv: Sequence[str]) -> None:
    """Run the benchmark and write docs/benchmarks/peers.* and peers-ratios.*; with --gguf, gguf.* and gguf-ratios.*."""
    args = parse_arguments(argv)
    single = first_per_category(args.available, args.limit)
    texts = [prompt.turns[0] for prompt in single]
    unseen = [prompt for prompt in args.available if prompt not in single]
    chosen = sample(unseen or single, args.concurrency * args.rounds, seed=0)
    groups = [[prompt.turns[0] for prompt in chosen[i :: args.rounds]] for i in range(args.rounds)]
    name, what = ("peers", "other systems") if args.gguf is None else ("gguf", "llama.cpp on one GGUF file")
    report = Report(name, f"Outrider beside {what}: greedy, single and concurrent requests")
    table = Report(f"{name}-ratios", f"Speedup of Outrider over {what}, per prompt")
    with tempfile.TemporaryDirectory(prefix="outrider-") as logs, contextlib.ExitStack() as stack:
        peers = list(peers_of(args, Path(logs)))
        for peer in peers:
            print(f"starting {peer.info.name}", flush=True)
            stack.enter_context(peer.running())
            peer.generate(["Say hello."], 16)
        bandwidth = read_bandwidth(len(os.sched_getaffinity(0)))
        replies, rates = interleave(peers, texts, groups, args.new_tokens)
        bandwidth = (bandwidth + read_bandwidth(len(os.sched_getaffinity(0)))) / 2
    infos = [peer.info for peer in peers]
    add_rates(report, infos, replies, rates, args.concurrency, bandwidth)
    add_ratios(table, infos, replies, rates, args.concurrency)
    report.notes = _notes(args, len(texts), bandwidth, unseen=len(unseen) >= len(chosen))
    table.notes = [
        "median and quartiles over prompts; columns with a number: over groups of that many concurrent requests; - if "
        "the other system runs concurrent requests one after another",
        *report.notes[:1],
    ]
    plot(report, f"{args.concurrency} concurrent, tokens/s")
    report.write()
    table.write()


def add_rates(
    report: Report, peers: Sequence[PeerInfo], replies: Replies, rates: Rates, count: int, bandwidth: float
) -> None:
    """Add a row per peer. rates: of groups of `count` concurrent requests; bandwidth: in bytes/s."""
    same = equal_texts(peers, replies)
    for one in peers:
        rate, low, high = median_and_quartiles([r.rate for r in replies[one.name] if r.tokens > 1])
        report.add(**{
            "peer": one.name, "weights": one.weights, "drafts": one.speculation or "-", "tokens/s": rate,
            "quartiles": f"{low:.0f}-{high:.0f}", "first token, ms": 1e3 * median(r.first for r in replies[one.name]),
            "floor, tokens/s": bandwidth / one.size, "of floor": rate * one.size / bandwidth,
            f"{count} concurrent, tokens/s": median(rates[one.name]) if one.batched else "-",
            "same text": same.get(one.name, "-"),
        })  # fmt: skip


def add_ratios(report: Report, peers: Sequence[PeerInfo], replies: Replies, rates: Rates, count: int) -> None:
    """Add a row per Outrider configuration: its speedups over every other peer, and over its own plain decoding."""
    others = [one for one in peers if one.family != "outrider" or not one.speculation]
    for ours in (one for one in peers if one.family == "outrider"):
        row: dict[str, object] = {"ours": ours.name}
        for other in others:
            row[other.name] = _spread(ratios(replies[ours.name], replies[other.name]))
            pairs = zip(rates[ours.name], rates[other.name], strict=True) if other.batched else ()
            row[f"{other.name}, {count}"] = _spread([a / b for a, b in pairs])
        report.add(**row)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle, low, high = median_and_quartiles(values)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def interleave(
    peers: Sequence[Peer], texts: Sequence[str], groups: Sequence[list[str]], new: int
) -> tuple[dict[str, list[Reply]], dict[str, list[float]]]:
    """Send each prompt alone to each peer; then each group concurrently, to peers that batch requests.

    Returns replies, and tokens/s of groups, by peer.
    """
    replies: dict[str, list[Reply]] = {peer.info.name: [] for peer in peers}
    rates: dict[str, list[float]] = {peer.info.name: [] for peer in peers}
    batched = [peer for peer in peers if peer.info.batched]
    order = random.Random(0)
    with Progress() as progress:
        bar = progress.add_task("prompts", total=len(texts) + len(groups))
        for text in texts:
            for peer in order.sample(peers, len(peers)):
                time.sleep(PAUSE)
                replies[peer.info.name] += peer.generate([text], new)[1]
            progress.advance(bar)
        for group in groups:
            for peer in order.sample(batched, len(batched)):
                time.sleep(PAUSE)
                seconds, answers = peer.generate(group, new)
                rates[peer.info.name].append(sum(reply.tokens for reply in answers) / seconds)
            progress.advance(bar)
    return replies, rates


def _notes(args: argparse.Namespace, count: int, bandwidth: float, *, unseen: bool) -> list[str]:
    prompts = "prompts not used before in the run" if unseen else "some prompts were used before in the run"
    model = resolve(args.model_path).name if args.gguf is None else args.gguf.name
    return [
        f"{model}; first turns of {count} prompts of {args.prompts.name}, at most "
        f"{args.new_tokens} new tokens, ended by end of text; each prompt is sent to all peers alternately",
        "tokens/s: of a single request after its first token, median and quartiles over prompts",
        f"floor: reading the weights once per token at {bandwidth / 1e9:.1f} GB/s; speculation can exceed it",
        f"concurrent: {prompts}; same text: answers equal to those of the same peer with plain decoding",
        "servers are called over HTTP; transformers and OpenVINO run in their own process; concurrent: - if a peer "
        "runs requests one after another, as transformers and OpenVINO with lookup do",
    ]


def plot(report: Report, concurrent: str) -> None:
    """Throughput of single and of concurrent requests by peer. concurrent: the column of the latter."""
    rows = sorted(report.rows, key=lambda row: row["tokens/s"])
    figure = new_figure(9, 0.8 + 0.3 * len(rows))
    panels = figure.subplots(1, 2, sharey=True)
    for panel, column in zip(panels, ("tokens/s", concurrent), strict=True):
        colors = ["tab:blue" if row["peer"].startswith("outrider") else "tab:gray" for row in rows]
        known = [row[column] != "-" for row in rows]
        rates = [row[column] if has_rate else 0.0 for row, has_rate in zip(rows, known, strict=True)]
        bars = panel.barh([row["peer"] for row in rows], rates, color=colors)
        labels = [f"{rate:.0f}" if has_rate else "-" for rate, has_rate in zip(rates, known, strict=True)]
        panel.bar_label(bars, labels, padding=2, fontsize=7)
        panel.set(xlabel=column)
        panel.margins(x=0.1)
        panel.tick_params(axis="y", labelsize=7)
    floors = [row["floor, tokens/s"] for row in rows]
    panels[0].plot(floors, range(len(rows)), "k|", markersize=9, label="floor of plain decoding")
    panels[0].legend(fontsize=7)
    report.save(figure)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The flags, checked; `available` has the prompts of the file. Exits with a usage error."""
    parser = argparse.ArgumentParser(prog="outrider bench peers", description=__doc__)
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--prompts", type=Path, default=BUNDLED_PROMPTS, help="file of prompts, as in `bench serve`")
    parser.add_argument("--limit", type=positive_int, help="maximum prompts per category (default: all)")
    parser.add_argument("--new-tokens", type=positive_int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--concurrency", "--together", type=positive_int, default=8,
                        help="requests of a group, which follow the single requests")  # fmt: skip
    parser.add_argument("--rounds", type=positive_int, default=5, help="groups of concurrent requests")
    parser.add_argument("--outrider", nargs="*", choices=list(_OUTRIDER_CONFIGS),
                        help="configurations of Outrider (default: all)")  # fmt: skip
    parser.add_argument("--transformers", nargs="*", metavar="MODE",
                        help="plain, lookup, or assisted:FOLDER of a draft model; no value omits it (default: plain "
                        "and lookup)")  # fmt: skip
    parser.add_argument("--transformers-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--llama-server", default="llama-server", help="server program of llama.cpp")
    parser.add_argument("--llama-model", nargs="*", default=[], metavar="LABEL=FILE", help="GGUF files for llama.cpp")
    parser.add_argument("--gguf", type=Path, metavar="FILE",
                        help="GGUF file for Outrider and llama.cpp alike; with it, --outrider and --transformers are "
                        "empty by default, because they serve --model-path")  # fmt: skip
    parser.add_argument("--gguf-draft", type=Path, metavar="FILE", help="GGUF file of a draft model, for both")
    parser.add_argument("--openvino-python", default=sys.executable, help="Python interpreter with openvino_genai")
    parser.add_argument("--openvino-model", nargs="*", default=[], metavar="LABEL=FOLDER", help="converted models")
    parser.add_argument("--vllm", help="vLLM's program, built for CPUs")
    args = parser.parse_args(argv)
    if args.new_tokens < 2:
        parser.error("--new-tokens: rates exclude the first token; use 2 or more")
    args.available = load_prompts(parser, args.prompts)
    whole = args.gguf is None
    args.outrider = args.outrider if args.outrider is not None else list(_OUTRIDER_CONFIGS) * whole
    args.transformers = args.transformers if args.transformers is not None else ["plain", "lookup"] * whole
    _check_files(parser, args)
    for mode in args.transformers:
        kind, _, folder = mode.partition(":")
        if mode not in ("plain", "lookup") and not (kind == "assisted" and Path(folder, "config.json").is_file()):
            parser.error(f"--transformers {mode!r} is not plain, lookup or assisted:FOLDER with a model")
    needed = [args.llama_server] * bool(args.llama_model or args.gguf) + [args.openvino_python] * bool(
        args.openvino_model
    )
    for program in [*needed, *([args.vllm] if args.vllm else [])]:
        if shutil.which(program) is None:
            parser.error(f"{program} is not executable; set its path by --llama-server, --openvino-python or --vllm")
    if not (args.outrider or args.transformers or args.llama_model or args.openvino_model or args.vllm or args.gguf):
        parser.error("there are no peers; select some with --outrider, --transformers or another flag")
    return args


def _check_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for text in [*args.llama_model, *args.openvino_model]:
        label, equals, file = text.partition("=")
        if not (label and equals and file and Path(file).exists()):
            parser.error(f"{text!r} is not LABEL=PATH of an existing path")
    if args.gguf_draft is not None and args.gguf is None:
        parser.error("--gguf-draft drafts for the model of --gguf; give both")
    for file in filter(None, (args.gguf, args.gguf_draft)):
        if not file.is_file():
            parser.error(f"{file} does not exist; name a GGUF file")
