"""Accept length of drafters against the time that they take for a proposal.

The target writes answers to prompts once. Each drafter then proposes trees of a number of tokens along them, one answer
at a time, through the draft service's own engine, KV cache and kernels on one core. The recorded tokens say which
draft tokens verification would have accepted, so all drafters see the same texts at the same speed of the target.

draft ms   from a commit and its hidden states until the tree is complete, median; the target's fusion is not included
floor ms   reading the weights as often as the model is run, at the bandwidth of one core measured in the same run
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness.flags import drafter_argument, load_prompts, positive_int, positive_ints
from bench.harness.processes import output_of
from bench.harness.prompts import Prompt, first_per_category
from bench.harness.report import Report, new_figure
from bench.limits.answers import recorded
from outrider.checkpoints import checkpoint
from outrider.drafts import has_bundled_head
from outrider.serving.features import FeatureSpec
from services.draft.formats.target import read_target
from services.target.kernels.cpu.bandwidth import read_bandwidth

_STEPS = "--speculative-num-steps"
_INT8 = ("--speculative-draft-model-quantization", "int8")
DRAFTERS = {
    "NGRAM": ("--speculative-algorithm", "NGRAM"),
    "EAGLE3": ("--speculative-algorithm", "EAGLE3", *_INT8),
}
TREES = ("2/8", "4/6", "6/6", "7/4")
_TEMPERATURES = (0.0, 1.0)
_NO_FLAGS_OF_DRAFT = ("--speculative-always",)  # of `outrider serve`; a replay always drafts


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/drafters.*."""
    parser = argparse.ArgumentParser(prog="outrider bench drafters", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("prompts", type=Path, help='JSON lines with "category" and "turns" or "prompt"')
    parser.add_argument("--model-path", default="default", help="the target")
    parser.add_argument("--drafter", type=drafter_argument, action="append", default=[], metavar="NAME=FLAGS",
                        help="additional drafter, given by flags of `outrider serve`; without "
                        f"{_STEPS} it is measured with each of --trees")  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="NAME", help="drafters to measure (default: all)")
    parser.add_argument("--trees", nargs="+", type=_tree, default=[_tree(tree) for tree in TREES],
                        metavar="STEPS/TOPK", help=f"default: {' '.join(TREES)}")  # fmt: skip
    parser.add_argument("--tokens", type=positive_int, default=16, help="tokens of a tree, the root included")
    parser.add_argument("--limit", type=positive_int, default=1, help="maximum prompts per category")
    parser.add_argument("--max-tokens", type=positive_int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--answers", type=Path, help="folder of the target's answers, written there if it has none "
                        "(default: a temporary one)")  # fmt: skip
    parser.add_argument("--aux-layers", nargs="+", type=int, default=None,
                        help="target layers that the drafters read, from 0 (default: those of EAGLE3)")  # fmt: skip
    args = parser.parse_args(argv)
    bundled = has_bundled_head(args.model_path)
    drafters = {name: flags for name, flags in DRAFTERS.items() if bundled or name != "EAGLE3"}
    drafters |= dict(args.drafter)
    if args.only is not None:
        if unknown := set(args.only) - drafters.keys():
            parser.error(f"--only: there is no drafter {', '.join(sorted(unknown))}; there are {', '.join(drafters)}")
        drafters = {name: flags for name, flags in drafters.items() if name in args.only}
    prompts = first_per_category(load_prompts(parser, args.prompts), args.limit)
    report = Report("drafters", "Accept length of drafters against draft time")
    with _answers(args, prompts) as (folder, jobs):
        report.notes = _notes(args, prompts, len(jobs))
        bandwidth = read_bandwidth(1)
        for name, flags in drafters.items():
            for tree, own in settings_of(flags, args.trees, args.tokens):
                request = {"flags": own, "model": args.model_path, "answers": str(folder), "jobs": jobs}
                result = _replayed(request)
                report.add(drafter=name, tree=tree, **_row(result, bandwidth))
                _plot(report)
                report.write()


def _tree(text: str) -> tuple[int, int]:
    steps, topk = positive_ints(text, "/", 2)
    return steps, topk


def settings_of(flags: Sequence[str], trees: Sequence[tuple[int, int]], tokens: int) -> Iterator[tuple[str, list[str]]]:
    """The trees of a drafter by name, with its flags."""
    own = [flag for flag in flags if flag not in _NO_FLAGS_OF_DRAFT]
    count = ["--speculative-num-draft-tokens", str(tokens)]
    if _STEPS in own or "NGRAM" in own:
        yield "its own", own if count[0] in own else [*own, *count]
        return
    for steps, topk in trees:
        yield f"{steps}/{topk}", [*own, _STEPS, str(steps), "--speculative-eagle-topk", str(topk), *count]


def _replayed(request: dict[str, Any]) -> dict[str, Any]:
    """The result of a replay in a process of its own. Raises BenchError."""
    found: dict[str, Any] = json.loads(
        output_of([sys.executable, "-m", "bench.speculation.drafter_replay"], json.dumps(request)).splitlines()[-1]
    )
    return found


def _row(result: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """Columns of a row. bandwidth: bytes per second."""
    median, high = result["seconds"]
    floor = result["passes"] * result["weights"] / bandwidth
    accept = {f"T={temperature}": length for temperature, length in result["accept"].items()}
    times = {"draft ms": 1e3 * median, "90 % ms": 1e3 * high, "passes": result["passes"]}
    return accept | times | {"floor ms": 1e3 * floor, "draft / floor": median / floor if floor else "-"}


@contextlib.contextmanager
def _answers(args: argparse.Namespace, prompts: Sequence[Prompt]) -> Iterator[tuple[Path, list[int]]]:
    """The folder of the target's answers at temperatures 0 and 1, and their jobs. Raises OutriderError."""
    layers = read_target(checkpoint.resolve(args.model_path)).layers
    states = FeatureSpec(tuple(i + 1 for i in args.aux_layers or (1, layers // 2 - 1, layers - 4)), final=True)
    with tempfile.TemporaryDirectory(prefix="outrider-") as scratch:
        folder = args.answers or Path(scratch)
        _, categories = recorded(args.model_path, states, prompts, folder, args.max_tokens, _TEMPERATURES)
        yield folder, list(categories)


def _notes(args: argparse.Namespace, prompts: Sequence[Prompt], count: int) -> list[str]:
    return [
        f"{checkpoint.resolve(args.model_path).name}; {count} answers of at most {args.max_tokens} tokens to "
        f"{len(prompts)} prompts of {args.prompts.name} (the first {args.limit} of each category), recorded once",
        f"tree: steps / children per node; {args.tokens} tokens, the root included. Accept length: tokens per "
        "verification, bonus included, at temperatures 0 and 1",
        "draft ms: from a commit and its hidden states until the tree is complete, on one core, median and 90th "
        "percentile; weights as the flags quantize them, EAGLE3 in int8",
        "passes: runs of the model for a tree; floor: reading its weights as often, at the bandwidth of one core",
    ]


def _plot(report: Report) -> None:
    figure = new_figure(9, 4)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, temperature in zip(axes, ("T=0", "T=1"), strict=True):
        points = [row for row in report.rows if temperature in row]
        for name in dict.fromkeys(row["drafter"] for row in points):
            own = [row for row in points if row["drafter"] == name]
            times, lengths = [row["draft ms"] for row in own], [row[temperature] for row in own]
            axis.plot(times, lengths, marker="o", linewidth=0.8, label=name)
            for row in own:
                axis.annotate(row["tree"], (row["draft ms"], row[temperature]), fontsize=6, xytext=(3, 3),
                              textcoords="offset points")  # fmt: skip
        frontier: list[dict[str, Any]] = []
        for row in sorted(points, key=lambda row: row["draft ms"]):
            if not frontier or row[temperature] > frontier[-1][temperature]:
                frontier.append(row)
        axis.step([row["draft ms"] for row in frontier], [row[temperature] for row in frontier], where="post",
                  color="gray", linewidth=0.6, linestyle=":")  # fmt: skip
        axis.set(xscale="log", xlabel="draft ms per proposal", title=f"temperature {temperature[2:]}")
    axes[0].set(ylabel="accept length")
    axes[0].legend(frameon=False, fontsize=8)
    report.save(figure)
