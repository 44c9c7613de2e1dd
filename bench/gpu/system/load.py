"""Requests over REST: answers of all sessions at a time, streamed, and the time in which all of them are generated."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from bench.harness.errors import BenchError
from bench.serve import metrics
from bench.serve.client import Client, Target
from bench.serve.load import raise_on_failure
from bench.serve.outcome import Outcome


class Turn(NamedTuple):
    """One answer of every session.

    rate: tokens/s of all sessions, each from its first token to its last. accept_length: tokens of a step. start, end:
    by the clock, the time in which every session generates. texts: the answers
    """

    rate: float
    accept_length: float
    start: float
    end: float
    texts: tuple[str, ...]


def generate(url: str, prompts: Sequence[Sequence[int]], tokens: int, *, speculation: bool, seed: int) -> Turn:
    """Greedy answers of `tokens` tokens to all prompts at a time. seed: of all requests.

    Raises BenchError if a request fails, or if an answer arrives in one piece.
    """
    return asyncio.run(_generate(url, prompts, tokens, speculation=speculation, seed=seed))


async def _generate(url: str, prompts: Sequence[Sequence[int]], tokens: int, *, speculation: bool, seed: int) -> Turn:
    body = {
        "temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "seed": seed,
        "speculation": "auto" if speculation else "off",
    }  # fmt: skip
    target = Target(url, "completions", "default", body)
    async with Client(target, time.perf_counter) as client:
        asked = [client.request(Outcome("all"), {"prompt": list(prompt)}) for prompt in prompts]
        outcomes = raise_on_failure(await asyncio.gather(*asked))
    seconds = [outcome.tpot for outcome in outcomes]
    if not all(seconds):
        raise BenchError(f"an answer of {tokens} tokens arrived in one piece; increase --new-tokens")
    drafts = metrics.speculation(outcomes)
    start, end = max(outcome.pieces[0] for outcome in outcomes), min(outcome.end for outcome in outcomes)
    if end <= start:  # one session ended before another began
        start, end = min(outcome.pieces[0] for outcome in outcomes), max(outcome.end for outcome in outcomes)
    return Turn(
        sum(1 / one for one in seconds if one), drafts.accept_length if drafts else 1.0, start, end,
        tuple(outcome.text for outcome in outcomes),
    )  # fmt: skip


def median_rate(turns: Sequence[Turn]) -> float:
    """The median of the turns' tokens/s."""
    return statistics.median(turn.rate for turn in turns)
