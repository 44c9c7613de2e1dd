"""Paired rounds: two systems answer the same prompts alternately, so that drift of the machine's speed affects both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bench.harness.prompts import Prompt
from bench.harness.ratios import ratio
from bench.serve import load
from bench.serve.client import Client, Target
from bench.serve.metrics import seconds_of
from bench.serve.outcome import Outcome


class Cell(NamedTuple):
    """A load: temperature and number of concurrent conversations."""

    temperature: float
    concurrency: int


class Pair(NamedTuple):
    """The outcomes of one round: of the setting, and of the baseline (`plain`)."""

    setting: Sequence[Outcome]
    plain: Sequence[Outcome]


def speed(outcomes: Sequence[Outcome]) -> float:
    """Throughput in tokens/s."""
    return sum(o.output_tokens for o in outcomes) / seconds_of(outcomes)


async def run_pairs(
    setting: Target,
    plain: Target,
    parts: Sequence[Sequence[Prompt]],
    cell: Cell,
    advance: Callable[[], None] = lambda: None,
) -> list[Pair]:
    """Run one round per part of the prompts; the system that runs first alternates.

    Caches of both systems are flushed before the first round. advance: called after each part of each system. Raises
    BenchError if a request fails, because its round would not be comparable.
    """
    targets = [replace(one, body={**one.body, "temperature": cell.temperature}) for one in (setting, plain)]
    for target in targets:
        async with Client(target) as client:
            await client.post("/flush_cache")
        load.raise_on_failure(await load.warm_up(target, 2 * cell.concurrency, cell.concurrency, seed=0))
    pairs = []
    for number, prompts in enumerate(parts):
        plan = load.Plan(cell.concurrency, seed=1000 * number)
        outcomes: list[Sequence[Outcome]] = [(), ()]
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            outcomes[side] = load.raise_on_failure(await load.run(targets[side], prompts, plan))
            advance()
        pairs.append(Pair(*outcomes))
    return pairs


def measured_row(pairs: Sequence[Pair], baseline: str = "plain") -> dict[str, Any]:
    """The figures of a setting in a cell, for a row of the report. baseline: name of what it is compared with."""
    own = [o for pair in pairs for o in pair.setting]
    plain = [o for pair in pairs for o in pair.plain]
    tokens, accepted = sum(o.output_tokens for o in own), sum(o.accepted or 0 for o in own)
    ratios = [speed(pair.setting) / speed(pair.plain) for pair in pairs]
    over = ratio(ratios)
    return {
        "tokens_per_s": tokens / sum(seconds_of(pair.setting) for pair in pairs),
        f"{baseline}_tokens_per_s": sum(o.output_tokens for o in plain) / sum(seconds_of(pair.plain) for pair in pairs),
        "ratio": over.mean,
        "low": over.low,
        "high": over.high,
        "accept_length": tokens / max(1, tokens - accepted),
        "acceptance_rate": accepted / max(1, sum(o.drafted or 0 for o in own)),
        "same_text": f"{sum(a.text == b.text for a, b in zip(own, plain, strict=True))}/{len(own)}",
        "round_s": sum(seconds_of(pair.setting) for pair in pairs) / len(pairs),
        "rounds": ratios,
    }
