"""Accept length of two drafters in one tree, at the same number of verified tokens, by the rule that merges them.

The target answers prompts of all categories at temperatures 0 and 1, and every drafter proposes its tree at every
position. Rules are then replayed on these trees: each drafter alone, an even split, the highest claim of both, the rule
of the draft service, and an oracle that verifies all nodes of both. No rule has seen an answer before it is replayed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.harness.flags import load_prompts, positive_int
from bench.harness.prompts import first_per_category
from bench.harness.report import Report, new_figure
from bench.together import trees
from bench.together.answers import TEMPERATURES, Answer, answers_of
from bench.together.cut_copy import write_cut_copy
from bench.together.rules import Alone, Combined, Highest, Oracle, Rule, Split, Step, Text, replay
from outrider.checkpoints import checkpoint
from outrider.config import DEFAULT_MODEL, Algorithm
from outrider.drafts import DEFAULT_HEAD

_HEAD = "EAGLE3"
_COPY_LEAVES_OUT = range(12, 18)
_RESAMPLES = 1000
_ALGORITHMS: dict[str, Algorithm] = {
    "EAGLE": "EAGLE", "EAGLE3": "EAGLE3", "DFLASH": "DFLASH", "STANDALONE": "STANDALONE",
}  # fmt: skip
_RULE = "combined claims"


class Pair(NamedTuple):
    """Two drafters in one tree, and what each proposes. answers: that they were replayed on."""

    names: tuple[str, str]
    trees: tuple[list[trees.Trees], list[trees.Trees]]
    answers: Sequence[Answer]


class Drafter(NamedTuple):
    """A draft model: name, algorithm, folder."""

    name: str
    algorithm: Algorithm
    folder: Path


def drafter_argument(text: str) -> Drafter:
    """A drafter on the command line, NAME=ALGORITHM:FOLDER. Raises ArgumentTypeError."""
    name, equals, rest = text.partition("=")
    algorithm, colon, folder = rest.partition(":")
    if not (name and equals and colon and folder) or algorithm not in _ALGORITHMS:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ALGORITHM:FOLDER with one of {', '.join(_ALGORITHMS)}")
    return Drafter(name, _ALGORITHMS[algorithm], Path(folder))


def rules_of(names: Sequence[str]) -> dict[str, Callable[[], Rule]]:
    """The rules by name."""
    shape = trees.SHAPE
    return {
        f"{names[0]} alone": lambda: Alone(0),
        f"{names[1]} alone": lambda: Alone(1),
        "even split": Split,
        "highest claim, 6 levels": lambda: Highest(shape.steps, shape.topk),
        "highest claim": Highest,
        f"{_RULE}, 6 levels": lambda: Combined(2, shape.steps, shape.topk),
        _RULE: lambda: Combined(2),
        "all nodes of both": Oracle,
    }


def add_rows(report: Report, pair: Pair) -> None:
    """Add a row for each temperature and rule."""
    for temperature in TEMPERATURES:
        chosen = [i for i, answer in enumerate(pair.answers) if answer.record.temperature == temperature]
        texts = [_text(pair.answers[i]) for i in chosen]
        own = [[found[i] for i in chosen] for found in pair.trees]
        counts = {}
        for name, rule in rules_of(pair.names).items():
            counts[name] = _by_text(replay(rule(), texts, own, trees.SHAPE.rows - 1), len(texts))
        best = max(list(counts)[:2], key=lambda name: _length(counts[name]))
        for name, found in counts.items():
            low, high = _interval(found, counts[best])
            row: dict[str, Any] = {
                "drafters": " and ".join(pair.names), "temperature": temperature, "rule": name,
                "over_best": _length(found) / _length(counts[best]), "interval": f"{low:.3f} to {high:.3f}",
                "all": _length(found),
            }  # fmt: skip
            for category in dict.fromkeys(text.category for text in texts):
                part = [i for i, text in enumerate(texts) if text.category == category]
                row[category] = _length(found[part])
            report.add(**row)


def _text(answer: Answer) -> Text:
    record = answer.record
    return Text(answer.category, record.temperature, record.tokens[record.prompt + 1 :].tolist())


def _by_text(steps: Sequence[Step], texts: int) -> NDArray[np.int64]:
    """[texts, 2]: tokens and steps of each text."""
    counts = np.zeros((texts, 2), np.int64)
    for step in steps:
        counts[step.text] += (step.tokens, 1)
    return counts


def _length(counts: NDArray[np.int64]) -> float:
    tokens, steps = counts.sum(axis=0).tolist()
    return float(tokens / max(steps, 1))


def _interval(counts: NDArray[np.int64], best: NDArray[np.int64]) -> tuple[float, float]:
    """95 % of the ratio of accept lengths, by resampling texts."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(counts), (_RESAMPLES, len(counts)))
    own, other = counts[drawn].sum(axis=1), best[drawn].sum(axis=1)
    ratios = own[:, 0] / own[:, 1] * other[:, 1] / other[:, 0]
    low, high = np.quantile(ratios, (0.025, 0.975)).tolist()
    return low, high


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/drafters-together.*."""
    parser = argparse.ArgumentParser(prog="outrider bench drafters-together", description=__doc__)
    parser.add_argument("prompts", type=Path, help='JSON lines with "category" and "turns" or "prompt"')
    parser.add_argument("--limit", type=positive_int, default=3, help="maximum prompts per category")
    parser.add_argument("--max-tokens", type=positive_int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--answers", type=Path, help="folder that keeps the answers (default: a temporary one)")
    parser.add_argument("--drafter", type=drafter_argument, action="append", default=[],
                        metavar="NAME=ALGORITHM:FOLDER", help="a draft model to be paired with the head")  # fmt: skip
    parser.add_argument("--copy-limit", type=positive_int, default=1, help="prompts per category for the copy, which "
                        "drafts as slowly as most of the target")  # fmt: skip
    args = parser.parse_args(argv)
    prompts = first_per_category(load_prompts(parser, args.prompts), args.limit)
    target = checkpoint.resolve(DEFAULT_MODEL)
    report = Report("drafters-together", "Two drafters in one tree: accept length by the rule that merges them")
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        answers = answers_of(DEFAULT_MODEL, DEFAULT_HEAD, prompts, args.answers or Path(folder), args.max_tokens)
        records = [answer.record for answer in answers]
        head = trees.of_model("EAGLE3", DEFAULT_HEAD, target, records)
        few = _first_of_each(answers, args.copy_limit)
        report.notes = _notes(args, answers, few, target)
        add_rows(report, Pair(("NGRAM", _HEAD), (trees.of_ngrams(records), head), answers))
        _write(report)
        for drafter in args.drafter:
            found = trees.of_model(drafter.algorithm, drafter.folder, target, records)
            add_rows(report, Pair((drafter.name, _HEAD), (found, head), answers))
            _write(report)
        copy = Path(folder) / "copy"
        write_cut_copy(target, copy, _COPY_LEAVES_OUT)
        found = trees.of_model("STANDALONE", copy, target, [records[i] for i in few])
        pair = Pair(("STANDALONE", _HEAD), (found, [head[i] for i in few]), [answers[i] for i in few])
        add_rows(report, pair)
        _write(report)


def _first_of_each(answers: Sequence[Answer], limit: int) -> list[int]:
    """Indices of the first answers of each category and temperature."""
    counts: dict[tuple[float, str], int] = {}
    chosen = []
    for i, answer in enumerate(answers):
        key = answer.record.temperature, answer.category
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= limit:
            chosen.append(i)
    return chosen


def _notes(args: argparse.Namespace, answers: Sequence[Answer], few: Sequence[int], target: Path) -> list[str]:
    shape = trees.SHAPE
    left_out = f"{_COPY_LEAVES_OUT.start} to {_COPY_LEAVES_OUT.stop - 1}"
    return [
        f"{target.name}; {len(answers)} answers to {args.prompts.name} (the first {args.limit} of each category) of at "
        f"most {args.max_tokens} tokens, half at temperature 0 and half at 1; replayed, one after another",
        f"every rule verifies {shape.rows} tokens, root included; a model proposes the best {shape.rows - 1} nodes of "
        f"a tree of {shape.steps} steps and {shape.topk} children, NGRAM {shape.rows - 1} nodes of one lookup",
        "over_best: accept length over that of the better drafter alone; interval: its 95 % when answers are resampled",
        "highest claim: the rule of earlier versions; 6 levels: as a target with the flags of the tree verifies nodes",
        f"{_RULE}: the rule of the draft service (docs/decisions/0037-drafters-together.md), which starts untaught",
        "all nodes of both: up to twice as many tokens, of which no rule with the same proposals can accept more",
        f"EAGLE3: the bundled head; STANDALONE: the target without its layers {left_out}, on {len(few)} answers",
    ]


def _write(report: Report) -> None:
    """Write the pairs that are done: the last one takes longest."""
    _plot(report)
    report.write()


def _plot(report: Report) -> None:
    groups = list(dict.fromkeys((row["drafters"], row["temperature"]) for row in report.rows))
    figure = new_figure(2.0 + 1.7 * len(groups), 3.6)
    axes = figure.subplots()
    names = list(rules_of(("one", "other")))
    for place, name in enumerate(names):
        own = [
            [row["all"] for row in report.rows if (row["drafters"], row["temperature"]) == group] for group in groups
        ]
        heights = [lengths[place] for lengths in own]
        axes.bar(np.arange(len(groups)) + 0.1 * (place - len(names) / 2), heights, 0.09, label=name)
    axes.set_xticks(
        range(len(groups)), [f"{drafters}\nT={temperature:g}" for drafters, temperature in groups], fontsize=7
    )
    axes.set_ylabel("accept length")
    axes.set_ylim(bottom=1.0)
    axes.legend(fontsize=7, ncols=2)
    report.save(figure)
