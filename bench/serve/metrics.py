"""Figures of a load from the outcomes of its requests. Pure functions; failed requests are only counted.

Latencies are in seconds:
- TTFT: from the time a request is due to its first piece, of text or of a tool call.
- TPOT: from the first piece to the end of the answer, divided by the tokens after the first, per request. The end
  may be later than the last piece, because of tokens without text. TPOT is too small if the server generates tokens
  before the first piece that it does not send.
- ITL: times between pieces, of all requests together. With speculation a piece has several tokens, so ITL is to be
  read with the tokens per piece.
- late: from the time a request is due to the time it is sent, because of the client or its concurrency limit.
  Latencies include it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.serve.outcome import Outcome

# Names of the limits of goodput, equal to vLLM's.
LIMITS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Distribution:
    """Statistics of times in seconds."""

    count: int
    mean: float
    median: float
    p90: float
    p99: float
    largest: float


@dataclass(frozen=True)
class Speculation:
    """Figures of speculation. accept_length: tokens per step, bonus included; acceptance_rate: accepted / verified.

    per_position: share of steps with draft tokens that accepted the token at depth 1, 2, ...; empty if unknown
    source: of the figures, for the terminal
    """

    accept_length: float
    acceptance_rate: float | None
    per_position: tuple[float, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Summary:
    """Figures of a load, or of one category of it. Rates are per second of the whole load, `seconds`.

    uncounted: requests without a token count from the server
    """

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
        """All fields, for a JSON file."""
        return asdict(self)


def distribution(values: Sequence[float]) -> Distribution | None:
    """Statistics of values; None if there are none."""
    if not len(values):
        return None
    array = np.asarray(values)
    median, p90, p99 = (float(value) for value in np.percentile(array, (50, 90, 99)))
    return Distribution(len(array), float(array.mean()), median, p90, p99, float(array.max()))


def seconds_of(outcomes: Sequence[Outcome]) -> float:
    """Seconds from the first request's due time to the end of the last answer."""
    return max(o.ended for o in outcomes) - min(o.due for o in outcomes) if outcomes else 0.0


def summarize(outcomes: Sequence[Outcome], seconds: float, limits: Mapping[str, float] | None = None) -> Summary:
    """Figures of requests. limits: of goodput, in seconds, with names in LIMITS."""
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
    """Figures of each category, in order of first occurrence."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.category, []).append(outcome)
    return {name: summarize(group, seconds) for name, group in groups.items()}


def meets(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """True if a request kept every limit. An answer of a single token has no TPOT and keeps its limit."""
    first = outcome.latency if outcome.ttft is None else outcome.ttft
    taken = {"ttft": first, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(taken[name] <= limit for name, limit in limits.items())


def speculation(outcomes: Sequence[Outcome]) -> Speculation | None:
    """Figures from the draft token counts of answers; None without counts, or if no draft token was verified."""
    known = [o for o in outcomes if o.drafted is not None and o.counted]
    drafted, accepted = sum(o.drafted or 0 for o in known), sum(o.accepted or 0 for o in known)
    if not drafted:
        return None
    tokens = sum(o.output_tokens for o in known)
    shares = per_position([o.histogram for o in known])
    return Speculation(tokens / max(1, tokens - accepted), accepted / drafted, shares, "answers")


def per_position(histograms: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Share of steps that accepted at least 1, 2, ... draft tokens.

    histograms: for each request, the number of steps that accepted 0, 1, 2, ... draft tokens
    """
    steps = [sum(counts) for counts in itertools.zip_longest(*histograms, fillvalue=0)]
    return tuple(sum(steps[depth:]) / sum(steps) for depth in range(1, len(steps))) if any(steps) else ()


def errors(outcomes: Sequence[Outcome]) -> dict[str, tuple[int, str]]:
    """Count of failed requests and an example, by kind of error; most frequent first."""
    counts = Counter(o.error for o in outcomes if o.error)
    example = {o.error: o.detail for o in reversed(outcomes) if o.error}
    return {kind: (count, example[kind]) for kind, count in counts.most_common()}


def tokens_over_time(outcomes: Sequence[Outcome], bins: int) -> tuple[list[float], list[float]]:
    """Output tokens/s in `bins` equal intervals of the load. Returns the starts of intervals in seconds, and the rates.

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
