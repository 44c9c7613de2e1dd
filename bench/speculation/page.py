"""The report of a comparison: its rows, what follows from them, and a plot; kept up to date while it is measured."""

from __future__ import annotations

import argparse
import shlex

from bench.harness.report import Report, earlier_rows
from bench.speculation import judge
from bench.speculation.settings import PLAIN, Setting
from outrider.checkpoints.checkpoint import resolve

_NAME = "speculation"
_COLUMNS = ("setting", "temperature", "concurrency", "tokens_per_s", "plain_tokens_per_s", "ratio", "low", "high",
            "accept_length", "acceptance_rate", "same_text", "round_s")  # fmt: skip
_SHORT = 3.0  # seconds of a round below which the figures are mostly those of the machine's moods
_WORDS = [
    "ratio: tokens a second over those of plain decoding, which took turns with the setting over the same prompts: "
    "geometric mean of the rounds; low, high: its 95 % confidence interval (Student's t over the rounds)",
    "a setting beats another, or plain decoding, where that interval of their quotient lies above 1, and else ties; of "
    "twenty comparisons one is wrong by chance, so take those that matter again, with --setting and another --seed",
    "names of explicit trees: steps x topk x rows (--speculative-num-steps, -eagle-topk, -num-draft-tokens)",
    "same_text: answers equal to those of plain decoding, same seed; round_s: seconds of a round of the setting",
    "the best explicit tree is the best of many on the rounds it is judged by, which favours it a little",
]
_WARNING = f"some rounds were shorter than {_SHORT:g} s, too short to tell: ask more prompts, or for longer answers"


class Page:
    """A report under way."""

    def __init__(self, args: argparse.Namespace, size: int) -> None:
        """size: prompts of a round.

        With args.resume it begins with the rows of the last run, if that asked the same. Raises ValueError if other
        code took those, or another machine.
        """
        self._args = args
        self._facts = facts(args, size)
        self.report = Report(_NAME, "Settings of speculation against plain decoding", columns=_COLUMNS)
        self.report.notes = [self._facts, *_WORDS]
        if args.resume:
            self.report.rows = earlier_rows(_NAME, lambda notes: self._facts in notes)

    def has(self, setting: Setting) -> bool:
        """True if a setting's rows are there."""
        return any(row["flags"] == shlex.join(setting.flags) for row in self.report.rows)

    def write(self) -> None:
        """Write what is known so far, with what follows from it; as long as that is nothing, an earlier page stays."""
        rows = self.report.rows
        if not rows:
            return
        proposed = [
            {
                "concurrency": concurrency,
                "setting": best.setting if best else PLAIN.name,
                "ratio": best.ratio.mean if best else 1.0,
                "command": command(self._args, best.flags if best else shlex.join(PLAIN.flags)),
            }
            for concurrency, best in judge.proposals(rows).items()
        ]
        self.report.more = [
            ("Trees that adapt against the best explicit one", judge.adaptive_against_fixed(rows)),
            ("What to serve with, by concurrency", proposed),
        ]
        plot(self.report)
        self.report.notes = [note for note in self.report.notes if note != _WARNING]
        if any(row["round_s"] < _SHORT for row in rows):
            self.report.notes.append(_WARNING)
        self.report.write()


def facts(args: argparse.Namespace, size: int) -> str:
    """What was asked of what; rows of two runs belong together if this is equal."""
    flags = f" {shlex.join(args.flags)}" if args.flags else ""
    ends = "of exactly" if args.ignore_eos else "of at most"
    return (
        f"{resolve(args.model_path).name}, {args.dtype}{flags}; {args.rounds} rounds of {size} prompts of "
        f"{args.prompts.name} (seed {args.seed}), {args.turns} turns, answers {ends} {args.max_tokens} tokens; "
        f"{' and '.join(map(str, args.concurrency))} at a time, temperature {' and '.join(map(str, args.temperature))}"
    )


def command(args: argparse.Namespace, flags: str) -> str:
    """How to serve with a setting's flags."""
    words = ["outrider", "serve", "--model-path", args.model_path]
    words += [] if args.dtype == "auto" else ["--dtype", args.dtype]
    return f"{shlex.join([*words, *args.flags])} {flags}"


def plot(report: Report) -> None:
    """Ratios over plain decoding with their spread, a panel a load."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    cells = list(dict.fromkeys((row["temperature"], row["concurrency"]) for row in report.rows))
    names = list(dict.fromkeys(row["setting"] for row in report.rows))[::-1]
    figure = Figure(figsize=(2.4 + 2.6 * len(cells), 1.4 + 0.28 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(cells), squeeze=False, sharey=True)[0]
    for axes, (temperature, concurrency) in zip(panels, cells, strict=True):
        for row in report.rows:
            if (row["temperature"], row["concurrency"]) == (temperature, concurrency):
                spread = [[row["ratio"] - row["low"]], [row["high"] - row["ratio"]]]
                colour = "tab:orange" if row["kind"] == "adaptive" else "tab:blue"
                axes.errorbar(row["ratio"], names.index(row["setting"]), xerr=spread, fmt="o", color=colour, capsize=2)
        axes.axvline(1.0, color="gray", linewidth=0.8)
        axes.set(title=f"T={temperature:g}, {concurrency} at a time", xlabel="over plain decoding")
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.grid(axis="x", alpha=0.3)
    report.save(figure)
