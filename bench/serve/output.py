"""Output of a load's figures: tables for the terminal, a JSON file and a plot."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.harness.report import new_figure, recipe
from bench.serve.metrics import Distribution, Speculation, Summary, errors, tokens_over_time
from bench.serve.outcome import Outcome

_TIME_BINS = 60
_LATE_THRESHOLD = 0.02  # seconds; a larger delay of sending is shown


def print_tables(
    console: Console,
    summary: Summary,
    categories: Mapping[str, Summary],
    outcomes: Sequence[Outcome],
    counters: Speculation | None,
) -> None:
    """Print the tables. counters: speculation by the server's metrics, if it exports any."""
    if summary.requests:
        console.print(_totals(summary))
        console.print(_latencies(summary))
    for source, speculation in (("answers", summary.speculation), ("metrics", counters)):
        if speculation is not None:
            line = f"[bold]speculation[/bold], by {source}: {_speculation_line(speculation)}"
            console.print(line, soft_wrap=True)
    if summary.requests and len(categories) > 1:
        console.print(_categories(categories))
    if summary.uncounted:
        console.print(
            f"[yellow]{summary.uncounted} answers have no usage: their pieces of text are counted as tokens[/yellow]"
        )
    if failures := errors(outcomes):
        table = Table("failed requests", "count", "example", title_justify="left", style="red")
        for kind, (count, example) in failures.items():
            table.add_row(kind, str(count), Text(example))
        console.print(table)


def _totals(summary: Summary) -> Table:
    table = Table(show_header=False)
    rows = [
        ("requests, successful / failed", f"{summary.requests} / {summary.failed}"),
        ("duration", f"{summary.seconds:.2f} s"),
        ("input tokens / output tokens", f"{summary.input_tokens:,} / {summary.output_tokens:,}"),
        ("requests per second", f"{summary.requests_per_s:.3f}"),
        ("output tokens per second", f"{summary.output_tokens_per_s:,.1f}"),
    ]
    if summary.ttft is not None:
        rows.append(("output tokens per piece of text", f"{summary.tokens_per_piece:.2f}"))
    if summary.late is not None and summary.late.largest > _LATE_THRESHOLD:
        rows.append(("largest delay of sending", f"{summary.late.largest:.3f} s"))
    if summary.goodput is not None:
        rows.append(("goodput, requests per second", f"{summary.goodput:.3f}"))
    for row in rows:
        table.add_row(*row)
    return table


def _latencies(summary: Summary) -> Table:
    table = Table("milliseconds", "mean", "median", "p90", "p99", "largest")
    for name, taken in (
        ("time to first token", summary.ttft),
        ("time per output token after it", summary.tpot),
        ("time between pieces of text", summary.itl),
        ("whole request", summary.latency),
    ):
        table.add_row(name, *_cells(taken))
    return table


def _cells(taken: Distribution | None) -> list[str]:
    values = () if taken is None else (taken.mean, taken.median, taken.p90, taken.p99, taken.largest)
    return [f"{1e3 * value:,.1f}" for value in values] or ["-"] * 5


def _speculation_line(speculation: Speculation) -> str:
    words = [f"accept length {speculation.accept_length:.2f}"]
    if speculation.acceptance_rate is not None:
        words.append(f"acceptance rate {speculation.acceptance_rate:.1%}")
    if speculation.per_position:
        reached = max((depth for depth, share in enumerate(speculation.per_position, 1) if share), default=1)
        words.append("by position " + " ".join(f"{share:.1%}" for share in speculation.per_position[:reached]))
    return ", ".join(words) + f" ({speculation.source})"


def _categories(categories: Mapping[str, Summary]) -> Table:
    columns = ("category", "requests", "failed", "output tokens", "TTFT, ms", "TPOT, ms", "accept length")
    table = Table(*columns, caption="times: median (p99)", caption_justify="left")
    for name, one in categories.items():
        table.add_row(
            Text(name),
            str(one.requests),
            str(one.failed),
            f"{one.output_tokens:,}",
            *(
                f"{1e3 * taken.median:,.1f} ({1e3 * taken.p99:,.1f})" if taken else "-"
                for taken in (one.ttft, one.tpot)
            ),
            f"{one.speculation.accept_length:.2f}" if one.speculation else "-",
        )
    return table


def check(json_file: Path | None, picture: Path | None) -> None:
    """Raises ValueError if a file cannot be written, or the format of the picture is unknown."""
    for file in filter(None, (json_file, picture)):
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK) or file.parent.is_file():
            raise ValueError(f"{file} is no file that can be written")
    if picture is not None and picture.suffix:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        kinds = FigureCanvasAgg.get_supported_filetypes()
        if picture.suffix[1:].lower() not in kinds:
            raise ValueError(f"{picture} has no known picture format; choose among {', '.join(kinds)}")


def write_json(
    file: Path,
    parameters: Mapping[str, Any],
    summary: Summary,
    categories: Mapping[str, Summary],
    outcomes: Sequence[Outcome],
    counters: Speculation | None,
) -> None:
    """Write all figures, what is needed to reproduce them, and an object per request. Times are in seconds.

    The hardware is the client's. Numbers that JSON cannot express, such as an infinite rate, are null.
    """
    content = {
        **recipe(),
        "parameters": dict(parameters),
        "summary": summary.as_json(),
        "server_speculation": asdict(counters) if counters else None,
        "categories": {name: one.as_json() for name, one in categories.items()},
        "errors": {kind: {"count": count, "example": example} for kind, (count, example) in errors(outcomes).items()},
        "requests": [_request_json(outcome) for outcome in outcomes],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """The value with None in place of infinite numbers and NaN."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _request_json(outcome: Outcome) -> dict[str, Any]:
    fields = ("category", "turn", "due", "sent", "ended", "prompt_tokens", "output_tokens", "counted", "drafted",
              "accepted", "finish", "error")  # fmt: skip
    line: dict[str, Any] = {name: getattr(outcome, name) for name in fields}
    timed = not outcome.error
    return line | {"ttft": outcome.ttft if timed else None, "tpot": outcome.tpot if timed else None}


def plot(file: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """Write distributions of latencies and throughput over time as a picture; the file's suffix sets its format."""
    good = [o for o in outcomes if not o.error]
    figure = new_figure(9.6, 3.4)
    latencies, tokens, over_time = figure.subplots(1, 3)
    whole = {
        "first token": [o.ttft for o in good if o.ttft is not None],
        "whole request": [o.latency for o in good],
    }
    each = {
        "per output token": [o.tpot for o in good if o.tpot is not None],
        "between pieces": [gap for o in good for gap in o.gaps],
    }
    for axes, named in ((latencies, whole), (tokens, each)):
        for name, values in named.items():
            if values:
                axes.ecdf([1e3 * value for value in values], label=name)
        axes.set(xlabel="milliseconds", ylabel="cumulative share" if axes is latencies else None)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, loc="lower right")
    begins, rates = tokens_over_time(outcomes, _TIME_BINS)
    if begins:
        over_time.stairs(rates, [*begins, begins[-1] + (begins[1] - begins[0])], fill=True, alpha=0.6)
    over_time.set(xlabel="seconds", ylabel="output tokens per second")
    over_time.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
