"""The report of a comparison of settings: rows, recommendations and a plot, rewritten after each setting."""

from __future__ import annotations

import argparse
import shlex

from bench.harness.report import Report, new_figure, rows_to_resume
from bench.speculation import comparison
from bench.speculation.settings import PLAIN, Setting
from outrider.checkpoints.checkpoint import resolve

_NAME = "speculation"
_MIN_ROUND_SECONDS = 3.0  # below it, variation of the machine's speed dominates
_NOTES = [
    "ratio: speedup in tokens/s over plain decoding, measured alternately on the same prompts: geometric mean of the "
    "rounds; low, high: its 95 % confidence interval (Student's t over the rounds)",
    "a setting beats another, or plain decoding, if that interval of their quotient lies above 1, otherwise they tie; "
    "one of twenty comparisons is wrong by chance: repeat important ones with --setting and another --seed",
    "names of explicit trees: steps x topk x tokens (--speculative-num-steps, -eagle-topk, -num-draft-tokens)",
    "same_text: answers equal to those of plain decoding, same seed; round_s: seconds of a round of the setting",
    "the best explicit tree is selected on the rounds that it is judged by, which slightly favours it",
]
_WARNING = f"some rounds were shorter than {_MIN_ROUND_SECONDS:g} s, too short: use more prompts or longer answers"


class Page:
    """A report in progress."""

    def __init__(self, args: argparse.Namespace, size: int) -> None:
        """size: prompts per round.

        With args.resume, start with the rows of the last run if its parameters are equal. Raises ValueError if their
        commit or hardware differs.
        """
        self._args = args
        self._facts = facts(args, size)
        columns = ("setting", "temperature", "concurrency", "tokens_per_s", f"{args.baseline.name}_tokens_per_s",
                   "ratio", "low", "high", "accept_length", "acceptance_rate", "same_text", "round_s")  # fmt: skip
        self.report = Report(_NAME, f"Settings of speculation against {_title(args.baseline)}", columns=columns)
        self.report.notes = [self._facts, *(note.replace(_title(PLAIN), _title(args.baseline)) for note in _NOTES)]
        if args.resume:
            self.report.rows = rows_to_resume(_NAME, lambda notes: self._facts in notes)

    def has(self, setting: Setting) -> bool:
        """True if the report has rows of a setting."""
        return any(row["flags"] == shlex.join(setting.flags) for row in self.report.rows)

    def write(self) -> None:
        """Write the rows so far and the recommendations; without rows, an earlier page is kept."""
        rows = self.report.rows
        if not rows:
            return
        recommended = [
            {
                "concurrency": concurrency,
                "setting": best.setting if best else self._args.baseline.name,
                "ratio": best.ratio.mean if best else 1.0,
                "command": command(self._args, best.flags if best else shlex.join(self._args.baseline.flags)),
            }
            for concurrency, best in comparison.recommendations(rows).items()
        ]
        self.report.more = [
            ("Adaptive trees against the best explicit tree", comparison.adaptive_against_fixed(rows)),
            ("Recommended settings by concurrency", recommended),
        ]
        plot(self.report, _title(self._args.baseline))
        self.report.notes = [note for note in self.report.notes if note != _WARNING]
        if any(row["round_s"] < _MIN_ROUND_SECONDS for row in rows):
            self.report.notes.append(_WARNING)
        self.report.write()


def _title(baseline: Setting) -> str:
    return "plain decoding" if baseline == PLAIN else baseline.name


def facts(args: argparse.Namespace, size: int) -> str:
    """The parameters of a run; rows of two runs can be combined if they are equal."""
    flags = f" {shlex.join(args.flags)}" if args.flags else ""
    ends = "of exactly" if args.ignore_eos else "of at most"
    baseline = "" if args.baseline == PLAIN else f"; {args.baseline.name} is {shlex.join(args.baseline.flags)}"
    return (
        f"{resolve(args.model_path).name}, {args.dtype}{flags}; {args.rounds} rounds of {size} prompts of "
        f"{args.prompts.name} (seed {args.seed}), {args.turns} turns, answers {ends} {args.max_tokens} tokens; "
        f"concurrency {', '.join(map(str, args.concurrency))}, temperature {', '.join(map(str, args.temperature))}"
        f"{baseline}"
    )


def command(args: argparse.Namespace, flags: str) -> str:
    """The command that serves with the flags of a setting."""
    words = ["outrider", "serve", "--model-path", args.model_path]
    words += [] if args.dtype == "auto" else ["--dtype", args.dtype]
    return f"{shlex.join([*words, *args.flags])} {flags}"


def plot(report: Report, baseline: str = _title(PLAIN)) -> None:
    """Speedups over a baseline with their confidence intervals, a panel per load."""
    cells = list(dict.fromkeys((row["temperature"], row["concurrency"]) for row in report.rows))
    names = list(dict.fromkeys(row["setting"] for row in report.rows))[::-1]
    figure = new_figure(2.4 + 2.6 * len(cells), 1.4 + 0.28 * len(names))
    panels = figure.subplots(1, len(cells), squeeze=False, sharey=True)[0]
    for axes, (temperature, concurrency) in zip(panels, cells, strict=True):
        for row in report.rows:
            if (row["temperature"], row["concurrency"]) == (temperature, concurrency):
                spread = [[row["ratio"] - row["low"]], [row["high"] - row["ratio"]]]
                colour = "tab:orange" if row["kind"] == "adaptive" else "tab:blue"
                axes.errorbar(row["ratio"], names.index(row["setting"]), xerr=spread, fmt="o", color=colour, capsize=2)
        axes.axvline(1.0, color="gray", linewidth=0.8)
        axes.set(title=f"T={temperature:g}, concurrency {concurrency}", xlabel=f"speedup over {baseline}")
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.grid(axis="x", alpha=0.3)
    report.save(figure)
