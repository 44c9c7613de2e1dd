"""What the services' checks of every message cost: the heartbeat, the owners of sessions, and the sizes of messages.

A step of simulated engines, relayed over gRPC, is two messages to the target and two to the draft service. Pairs of the
same services with the checks and without them alternate; the checks are also timed alone, on the same messages.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.harness.report import Report
from bench.streams.relay import relayed
from bench.streams.run import services
from outrider.serving.loop import Heart
from outrider.serving.messages import Message
from outrider.speculation.proposal import Proposal
from outrider.transport import guard
from outrider.transport.outbox import Outbox, Routes

COLUMNS = ("sessions", "steps_per_s", "steps_per_s_unchecked", "cost_percent", "checks_us", "share_percent")
_MESSAGES = 4  # of a step, each of which a service receives
_BEATS = 3  # of the heart for a message: begin, rest, and begin of the step that follows
_REPEATS = 2000


def remove_checks() -> None:
    """Make this process check no message."""

    def admit(routes: Any, message: Message, outbox: Outbox) -> tuple[Message, list[Any]]:
        for request in message.opens:
            routes._owners[request.session_id] = outbox
        return message, []

    def nothing(*_: Any) -> None:
        return

    changed: list[tuple[Any, str, Any]] = [
        (Heart, "begin", nothing),
        (Heart, "rest", nothing),
        (Routes, "admit", admit),
        (guard, "_bounded", lambda handler, _: handler),
    ]
    for owner, name, replacement in changed:
        setattr(owner, name, replacement)


def seconds_of_checks(sessions: int) -> float:
    """Seconds that the checks of a message with proposals of `sessions` sessions take."""
    heart, routes = Heart(), Routes()
    outbox = Outbox()
    tokens = np.arange(4, dtype=np.uint32)
    proposals = [
        Proposal(one, 10, one, tokens, tokens.astype(np.int32), tokens.astype(np.float32), 10)
        for one in range(sessions)
    ]
    routes._owners = dict.fromkeys(range(sessions), outbox)
    message, content = Message(proposals=proposals), bytes(100)
    checked = _bounded_parser()

    def check() -> None:
        for _ in range(_BEATS):
            heart.begin()
        routes.admit(message, outbox)
        checked(content)

    return _best(check) - _best(lambda: len(content))


def _bounded_parser() -> Callable[[bytes], Any]:
    """The guard's parser of a stream's messages, around one that does nothing."""

    class Handler:
        request_deserializer = staticmethod(len)
        response_serializer = None
        stream_stream = staticmethod(lambda *_: None)

    parser = guard._bounded(Handler, 1 << 20).request_deserializer
    assert parser is not None, "the handler has one"
    return parser


def _best(work: Callable[[], object]) -> float:
    return min(timeit.repeat(work, number=_REPEATS, repeat=7)) / _REPEATS


def compared(rounds: int, sessions: Sequence[int], steps: int, report: Report) -> None:
    """Add a row for each number of sessions."""
    with tempfile.TemporaryDirectory() as folder, services(folder) as checked, services(folder, "unchecked") as bare:
        relayed(checked, 1, 50)
        relayed(bare, 1, 50)
        for count in sessions:
            pairs = []
            for turn in range(rounds):
                both = (checked, bare) if turn % 2 else (bare, checked)
                times = [relayed(addresses, count, steps) / steps for addresses in both]
                pairs.append(times if turn % 2 else times[::-1])
            alone = seconds_of_checks(count)
            with_checks, without = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
            report.add(
                sessions=count,
                steps_per_s=1 / with_checks,
                steps_per_s_unchecked=1 / without,
                cost_percent=100 * (statistics.median(pair[0] / pair[1] for pair in pairs) - 1),
                checks_us=1e6 * _MESSAGES * alone,
                share_percent=100 * _MESSAGES * alone / with_checks,
            )


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/checks.*."""
    parser = argparse.ArgumentParser(prog="outrider bench checks", description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 64], help="concurrent sessions")
    parser.add_argument("--steps", type=int, default=800, help="steps of a measurement")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of measurements; the report has medians")
    args = parser.parse_args(argv)
    report = Report("checks", "Cost of the services' checks of every message", columns=COLUMNS)
    report.notes = [
        "steps_per_s: of simulated engines that do nothing, over gRPC, with four messages a step; unchecked: without "
        "heartbeat, owners of sessions and sizes of messages; cost: median of the ratios of pairs, less 1; noise where "
        "other processes share the cores",
        "checks_us: of a step, timed alone on the same messages; share: of the time of a step",
        f"medians of {args.rounds} pairs of {args.steps} steps, in turns",
    ]
    compared(args.rounds, args.sessions, args.steps, report)
    report.write()
