"""From what became of requests to figures. Pure functions; failed requests take part in nothing but the count of them.

Latencies are in seconds. TTFT: from when a request was due to its first piece, of text or of a call of a tool. TPOT:
time from the first piece to the end of the answer over the tokens after the first, by request; the end may come behind
the last piece, for tokens without text, and tokens that a server hides before the first piece make it too small. ITL:
times between pieces, of all requests together; with speculation a piece has several tokens, so it stands beside the
tokens of a piece. late: from when a request was due to when it was sent, which latencies have in them; it is the
client's doing, or that of a limit of concurrency.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.serve.outcome import Outcome

# Names of goodput's limits, as vLLM has them.
LIMITS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Distribution:
    """Of times, in seconds."""

    count: int
    mean: float
    median: float
    p90: float
    p99: float
    largest: float


@dataclass(frozen=True)
class Speculation:
    """What became of draft tokens. accept_length: tokens a step, bonus included; acceptance_rate: accepted / verified.

    per_position: share of the steps that had a draft in which the token at each depth of it was accepted; empty if the
        server does not tell
    source: where it was read
    """

    accept_length: float
    acceptance_rate: float | None
    per_position: tuple[float, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Summary:
    """Figures of a load, or of one category in it. Rates are over `seconds`, the whole load's."""

    requests: int
    failed: int
    seconds: float
    input_tokens: int
    output_tokens: int
    uncounted: int
    requests_per_s: float
    output_tokens_per_s: float
    tokens_per_piece: float
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    latency: Distribution | None
    late: Distribution | None
    speculation: Speculation | None
    goodput: float | None

    def as_json(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


def distribution(values: Sequence[float]) -> Distribution | None:
    """Of values; None if there are none."""
    if not len(values):
        return None
    array = np.asarray(values)
    median, p90, p99 = (float(value) for value in np.percentile(array, (50, 90, 99)))
    return Distribution(len(array), float(array.mean()), median, p90, p99, float(array.max()))


def seconds_of(outcomes: Sequence[Outcome]) -> float:
    """From the first request's beginning to the last one's end."""
    return max(o.ended for o in outcomes) - min(o.due for o in outcomes) if outcomes else 0.0


def summarize(outcomes: Sequence[Outcome], seconds: float, limits: Mapping[str, float] | None = None) -> Summary:
    """Figures of requests. limits: of goodput, in seconds, by the names in LIMITS."""
    good = [o for o in outcomes if not o.error]
    tokens = sum(o.output_tokens for o in good)
    span = max(seconds, 1e-9)
    streamed = [o for o in good if o.streamed]
    return Summary(
        requests=len(good),
        failed=len(outcomes) - len(good),
        seconds=seconds,
        input_tokens=sum(o.prompt_tokens for o in good),
        output_tokens=tokens,
        uncounted=sum(not o.counted for o in good),
        requests_per_s=len(good) / span,
        output_tokens_per_s=tokens / span,
        tokens_per_piece=tokens / max(1, sum(len(o.pieces) for o in good)),
        ttft=distribution([o.ttft for o in good if o.ttft is not None]),
        tpot=distribution([o.tpot for o in streamed if o.tpot is not None]),
        itl=distribution([gap for o in streamed for gap in o.gaps]),
        latency=distribution([o.latency for o in good]),
        late=distribution([o.sent - o.due for o in good]),
        speculation=speculation(good),
        goodput=None if limits is None else sum(meets(o, limits) for o in good) / span,
    )


def by_category(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Summary]:
    """Figures of each category, in the order in which they first came."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.category, []).append(outcome)
    return {name: summarize(group, seconds) for name, group in groups.items()}


def meets(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """True if a request kept every limit; one of a single token has no time per further token to exceed."""
    first = outcome.latency if outcome.ttft is None else outcome.ttft
    taken = {"ttft": first, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(taken[name] <= limit for name, limit in limits.items())


def speculation(outcomes: Sequence[Outcome]) -> Speculation | None:
    """From what answers tell of their draft tokens; None if they tell nothing, or if no draft token was verified."""
    told = [o for o in outcomes if o.drafted is not None and o.counted]
    drafted, accepted = sum(o.drafted or 0 for o in told), sum(o.accepted or 0 for o in told)
    if not drafted:
        return None
    tokens = sum(o.output_tokens for o in told)
    shares = per_position([o.histogram for o in told])
    return Speculation(tokens / max(1, tokens - accepted), accepted / drafted, shares, "answers")


def per_position(histograms: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Share of steps that accepted at least 1, 2, ... tokens, from how many accepted 0, 1, 2, ..., by request."""
    steps = [sum(counts) for counts in itertools.zip_longest(*histograms, fillvalue=0)]
    return tuple(sum(steps[depth:]) / sum(steps) for depth in range(1, len(steps))) if any(steps) else ()


def errors(outcomes: Sequence[Outcome]) -> dict[str, tuple[int, str]]:
    """How many requests failed, and an example, by kind; the most frequent first."""
    counts = Counter(o.error for o in outcomes if o.error)
    example = {o.error: o.detail for o in reversed(outcomes) if o.error}
    return {kind: (count, example[kind]) for kind, count in counts.most_common()}


def tokens_over_time(outcomes: Sequence[Outcome], bins: int) -> tuple[list[float], list[float]]:
    """Output tokens a second, in `bins` equal parts of the load: where each part begins in seconds, and the rate in it.

    The tokens of a request are spread evenly over its pieces.
    """
    good = [o for o in outcomes if not o.error]
    if not good:
        return [], []
    times = np.concatenate([o.pieces for o in good])
    weights = np.concatenate([np.full(len(o.pieces), o.output_tokens / len(o.pieces)) for o in good])
    end = max(o.ended for o in outcomes)
    counts, edges = np.histogram(times, bins=bins, range=(0.0, end), weights=weights)
    return edges[:-1].tolist(), (counts * bins / end).tolist()
