"""How far the drafts of a head reach, and what limits them.

The target's own answers to prompts of a file are recorded with its hidden states. A tree is grown at every token of
them, and the recorded text shows what verification would accept. Every step then takes away one limit:

    tree             the tree that is served: the best nodes of all candidates
    candidates       all candidates are verified; no choice of as many nodes in hindsight accepts more
    beam             at every level the recorded token is among those that are expanded, if it is a candidate
    own states       the head reads the target's states at every level, never its own
    ranking          every token of the draft's vocabulary is a candidate
    vocabulary       every token is: as deep as the tree

Noise is that of the answers, as in use, so at temperature 1 ranks are those of log-probability plus noise.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from bench.harness.flags import load_prompts, positive_int
from bench.harness.prompts import first_per_category
from bench.harness.report import Report, new_figure
from bench.limits.answers import recorded
from bench.limits.growth import Answer, Grower, Policy, Ranks, read_head
from bench.limits.walks import Walks
from outrider.checkpoints.checkpoint import resolve
from outrider.drafts import DEFAULT_HEAD
from outrider.speculation.shape import TreeShape
from services.draft.learning.records.store import Record

TREE = TreeShape(6, 6, 16)
POLICIES = {
    "4 steps, 8 children": Policy(TreeShape(4, 8, 16)),
    "8 steps, 6 children": Policy(TreeShape(8, 6, 16)),
    "6 steps, 10 children": Policy(TreeShape(6, 10, 16)),
    "probabilities to the power of 0.75": Policy(TREE, spread=(0.75,)),
    "probabilities to the power of 1.35": Policy(TREE, spread=(1.35,)),
    "logits times 1.15": Policy(TREE, sharpness=(1.15,)),
    "24 tokens": Policy(TreeShape(6, 6, 24)),
    "32 tokens": Policy(TreeShape(6, 6, 32)),
}
LIMITS = ("tree", "candidates", "beam", "own states", "ranking", "vocabulary")
TOPS = (1, 2, 3, 6, 10)


def limits_of(grower: Grower, answer: Answer, tree: TreeShape) -> tuple[dict[str, NDArray[np.int64]], Ranks]:
    """Accepted draft tokens at every root by limit, and the ranks of the recorded tokens."""
    ranks, trees = grower.ranks(answer, tree.steps), grower.trees(answer, Policy(tree))
    most = np.minimum(len(answer.record.tokens) - answer.roots - 3, tree.steps)
    vocab = len(grower.head.ids)

    def along(found: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        accepted: NDArray[np.int64] = np.minimum(np.cumprod(found < count, axis=1).sum(axis=1), most)
        return accepted

    found = (
        trees.chosen, trees.grown, along(ranks.own, tree.topk), along(ranks.true, tree.topk), along(ranks.true, vocab),
        most,
    )  # fmt: skip
    return dict(zip(LIMITS, found, strict=True)), ranks


def measure(
    report: Report, grower: Grower, records: Sequence[tuple[Record, str]], policies: dict[str, Policy]
) -> dict[float, dict[str, Walks]]:
    """Measure all answers, and fill the report's tables. Returns the walks by temperature and limit."""
    walks: dict[float, dict[str, Walks]] = {}
    ranks: dict[float, list[Ranks]] = {}
    others: dict[float, dict[str, Walks]] = {}
    for record, category in track(records, "answers"):
        answer = Answer(record, max([TREE.steps, *(policy.shape.steps for policy in policies.values())]))
        if not len(answer.roots):
            continue
        temperature = record.temperature
        found, own = limits_of(grower, answer, TREE)
        ranks.setdefault(temperature, []).append(own)
        for name, accepted in found.items():
            walks.setdefault(temperature, {}).setdefault(name, Walks()).add(category, accepted)
        for name, policy in policies.items():
            trees = others.setdefault(temperature, {}).setdefault(name, Walks())
            trees.add(category, grower.trees(answer, policy).chosen)
    categories = list(dict.fromkeys(category for _, category in records))
    for temperature, by_limit in sorted(walks.items()):
        for name, own_walks in by_limit.items():
            lengths = {category: own_walks.length(category) for category in categories}
            report.add(
                temperature=temperature, limit=name, all=own_walks.length(), interval=own_walks.interval(), **lengths
            )  # fmt: skip
    vocab = len(grower.head.ids)
    report.more = [("Share of recorded tokens among the first candidates, by tokens ahead", _shares(ranks, vocab))]
    if others:
        report.more.append(("Trees of other shapes and rankings", _trees(walks, others)))
    return walks


def _shares(ranks: dict[float, list[Ranks]], vocab: int) -> list[dict[str, Any]]:
    rows = []
    for temperature, found in sorted(ranks.items()):
        for states in ("own", "true"):
            all_ranks = np.concatenate([getattr(one, states) for one in found])
            for top in (*TOPS, vocab):
                known = all_ranks >= 0
                shares = (known & (all_ranks < top)).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
                first = "vocabulary" if top == vocab else f"first {top}"
                ahead = {f"{depth}": float(share) for depth, share in enumerate(shares, start=1)}
                rows.append({"temperature": temperature, "states": states, "among": first, **ahead})
    return rows


def _trees(
    walks: dict[float, dict[str, Walks]], others: dict[float, dict[str, Walks]]
) -> list[dict[str, Any]]:  # fmt: skip
    rows = []
    for temperature, by_name in sorted(others.items()):
        served = walks[temperature]["tree"].length()
        for name, own in by_name.items():
            length = own.length()
            rows.append(
                {"temperature": temperature, "tree": name, "all": length, "change, %": 100 * (length / served - 1)}
            )  # fmt: skip
    return rows


def main(argv: Sequence[str]) -> None:
    """Run the benchmark and write docs/benchmarks/limits.*."""
    parser = argparse.ArgumentParser(
        prog="outrider bench limits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path, help='JSON lines with "category" and "turns" or "prompt"')
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--head", type=Path, default=DEFAULT_HEAD, help="folder of an EAGLE or EAGLE3 head")
    parser.add_argument("--limit", type=positive_int, help="maximum prompts per category (default: all)")
    parser.add_argument("--max-tokens", type=positive_int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--answers", type=Path, help="folder that keeps the answers for later runs")
    parser.add_argument("--trees", nargs="*", choices=list(POLICIES), default=[], metavar="NAME",
                        help=f"other trees: {'; '.join(POLICIES)}")  # fmt: skip
    args = parser.parse_args(argv)
    prompts = first_per_category(load_prompts(parser, args.prompts), args.limit)
    model = resolve(args.model_path)
    grower = Grower(read_head(args.head, model))
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        store, categories = recorded(
            args.model_path, grower.head.algorithm.states, prompts, args.answers or Path(folder), args.max_tokens,
            args.temperature,
        )  # fmt: skip
        reader = store.read()
        jobs = reader.entries["job"].tolist()
        records = [(reader.record(i), categories[job]) for i, job in enumerate(jobs) if job in categories]
        report = Report("limits", "What limits the drafts of a head")
        report.notes = _notes(args, model.name, len(records))
        walks = measure(report, grower, records, {name: POLICIES[name] for name in args.trees})
    _plot(report, walks)
    report.write()


def _notes(args: argparse.Namespace, model: str, answers: int) -> list[str]:
    part = "all prompts" if args.limit is None else f"the first {args.limit} prompts of each category"
    return [
        f"{model}, head {args.head.name}; {answers} answers to first turns, {part} of {args.prompts.name}, at most "
        f"{args.max_tokens} tokens each",
        "accept length: tokens a step, bonus included; interval: half of its 95 % interval, by bootstrap over answers",
        f"tree: {TREE.steps} steps, {TREE.topk} children, {TREE.rows} tokens with the root, as served",
        "candidates: all are verified, which no choice of nodes exceeds",
        "beam: the recorded token is expanded wherever it is a candidate",
        "own states: besides, the head reads the target's states at every level",
        "ranking: besides, every token of the draft's vocabulary is a candidate",
        "vocabulary: besides, every token is, so that only the depth limits the draft",
    ]


def _plot(report: Report, walks: dict[float, dict[str, Walks]]) -> None:
    figure = new_figure(7, 3.2)
    axes = figure.subplots()
    width = 0.8 / max(len(walks), 1)
    for i, (temperature, by_limit) in enumerate(sorted(walks.items())):
        lengths = [by_limit[name].length() for name in LIMITS]
        bars = axes.bar(np.arange(len(LIMITS)) + i * width, lengths, width, label=f"temperature {temperature:g}")
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(np.arange(len(LIMITS)) + 0.4 - width / 2, LIMITS)
    axes.set_ylabel("accept length")
    axes.legend(fontsize=8)
    report.save(figure)
