"""Pools of replicas behind gateways: throughput, gateway processor time, joins and losses, shares, and saturation.

Services, streams, wire and gateways are the real ones; only the engines are simulated: a step takes a fixed time. Every
text is checked. `--reckon` computes the traffic and the gateways of large pools from the figures of the page, as each
measurement does at its end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from bench.harness.errors import BenchError
from bench.harness.flags import positive_float, positive_int
from bench.harness.report import Report, format_row, new_figure, results_folder
from bench.pools.parts import Row, Sizes, changes, features, saturation, shares, throughput
from bench.pools.quota import can_limit
from bench.pools.reckoned_page import write_reckoned

PARTS = ("throughput", "features", "gateways", "changes", "shares")
SHOWN = (
    "targets", "drafts", "sessions", "tokens/s", "engines", "accept length", "gateway cores", "gateway µs/token",
    "begin, ms", "first token, ms", "longest pause, ms", "Jain",
)  # fmt: skip
_TINY = Sizes(
    points=((2, 2, 8),), limited=(2, 2), loads=(4,), counts=(2,), changing=8, sharing=14, step=10.0, draft_step=2.0,
    tokens=64, row_bytes=64, seconds=0.5, settle=0.2, rounds=1,
)  # fmt: skip
_TITLES = {
    "features": "Hidden states that a gateway relays",
    "gateways": "Where a gateway saturates, and what one more brings",
    "changes": "Replicas that join and leave",
    "shares": "Targets of unequal speed",
}


def main(argv: Sequence[str]) -> None:
    """Run the benchmark and write docs/benchmarks/pools.* and pools-reckoned.*."""
    parser = argparse.ArgumentParser(
        prog="outrider bench pools", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--step-ms", type=positive_float, help="step of a target, in ms (default: 50)")
    parser.add_argument("--seconds", type=positive_float, help="of each window (default: 3)")
    parser.add_argument("--rounds", type=positive_int, help="of joins and losses (default: 3)")
    parser.add_argument("--gateway-cores", type=float, default=0.2, metavar="SHARE",
                        help="share of a core of each gateway process in the part `gateways`, so that it saturates "
                        "before this machine; needs root; 0: no limit")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="small pools and short windows")
    parser.add_argument("--reckon", action="store_true", help="measure nothing; compute from the figures of the page")
    args = parser.parse_args(argv)
    if args.reckon:
        write_reckoned(_kept())
        return
    report = Report("pools", "Pools of replicas, with simulated engines", columns=SHOWN)
    sizes = _sizes(args)
    cores = args.gateway_cores if not args.gateway_cores or can_limit() else 0.0
    report.notes = _notes(sizes, cores)
    if "throughput" not in args.parts:
        report.columns = ()
    _measure(report, sizes, args.parts, cores)
    _plot(report)
    report.write()
    if {"throughput", "features"} <= set(args.parts):
        write_reckoned(_kept())


def _sizes(args: argparse.Namespace) -> Sizes:
    sizes = _TINY if args.tiny else Sizes()
    given = {"step": args.step_ms, "seconds": args.seconds, "rounds": args.rounds}
    return replace(sizes, **{name: value for name, value in given.items() if value is not None})


def _measure(report: Report, sizes: Sizes, parts: Sequence[str], cores: float) -> None:
    """Add the rows of the parts to the report."""
    with ExitStack() as stack:
        pools = {"throughput", "gateways", "changes"} & set(parts)
        members = stack.enter_context(sizes.pools(*sizes.most)) if pools else []
        if "throughput" in parts:
            for row in throughput(sizes, members):
                report.add(**row)
        rows_of: dict[str, Callable[[], Iterator[Row]]] = {
            "gateways": lambda: saturation(sizes, members, cores),
            "changes": lambda: changes(sizes, members),
        }
        for part in ("gateways", "changes"):
            if part in parts:
                report.more.append((_TITLES[part], _printed(rows_of[part]())))
    # These have services of their own.
    for part, rows in (("features", features), ("shares", shares)):
        if part in parts:
            report.more.append((_TITLES[part], _printed(rows(sizes))))


def _printed(rows: Iterator[Row]) -> list[Row]:
    kept = []
    for row in rows:
        print(format_row(row), flush=True)
        kept.append(row)
    return kept


def _kept() -> dict[str, Any]:
    """The figures of the page. Raises BenchError without them."""
    file = results_folder() / "pools.json"
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"{file} cannot be read ({error}); run `outrider bench pools` first") from None
    if not content["rows"] or _TITLES["features"] not in content.get("more", {}):
        raise BenchError(f"{file} lacks the parts throughput and features; run `outrider bench pools` without --parts")
    content["features"] = content["more"][_TITLES["features"]]
    return content


def _notes(sizes: Sizes, cores: float) -> list[str]:
    limit = f"each gateway process has {cores:g} of a core, by a quota of its cgroup" if cores else "no limit"
    return [
        f"A target's step takes {sizes.step:g} ms and commits up to {sizes.accept_length} tokens in each session; a "
        f"draft service's takes {sizes.draft_step:g} ms. They sleep, and share the cores of this machine with gateways "
        "and clients",
        f"Clients read answers of {sizes.tokens} tokens over SSE, one after the other; every text was the known one. "
        f"TCP on the loopback interface; windows of {sizes.seconds:g} s",
        "engines: tokens/s over those of engines that never wait; accept length: tokens of a commit; Jain: index of "
        "the sessions' tokens, 1 if all have equally many",
        "Gateway cores and µs/token: processor time of all gateways, for requests and all; busy: of its limit",
        "begin: until all sessions, which begin at once, have a token; a second later the window begins. First token, "
        "longest pause: of the window, the longest wait for a first token and between two pieces of an answer",
        f"Where a gateway saturates: {sizes.limited[0]} targets and {sizes.limited[1]} drafts; {limit}. Proposals that "
        "a busy gateway relays late cost accept length, and so more commits a token",
        f"Joins and losses: 2 targets, 2 drafts, {sizes.changing} sessions with answers of {sizes.tokens // 2} tokens; "
        f"medians and maxima of {sizes.rounds} rounds. First token: until a client has one that came through the "
        "replica, or with the help of its proposals; of one that serves again, from its readiness on. Reported: until "
        "`/workers` shows it ready, or gone",
        f"Unequal targets: {sizes.sharing} sessions, where they are over {sizes.seconds:g} s",
    ]


def _plot(report: Report) -> None:
    rows = dict(report.more).get(_TITLES["gateways"], [])
    if not report.rows or not rows:
        return
    figure = new_figure(8.4, 3.4)
    left, right = figure.subplots(1, 2)
    for targets in dict.fromkeys(row["targets"] for row in report.rows):
        points = [(row["sessions"], row["tokens/s"]) for row in report.rows if row["targets"] == targets]
        left.plot(*zip(*sorted(points), strict=True), "o-", label=f"{targets} targets")
    left.set(xlabel="sessions", ylabel="tokens/s", title="one gateway", xscale="log")
    left.legend(fontsize=8)
    names = [f"{row['gateways']}×{row['processes each']}\n{row['sessions']}" for row in rows]
    right.bar(range(len(rows)), [row["tokens/s"] for row in rows])
    right.set_xticks(range(len(rows)), names, fontsize=8)
    right.set(xlabel="gateways × processes, sessions", title="gateways with a limit")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    report.save(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
