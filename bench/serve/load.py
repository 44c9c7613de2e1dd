"""Schedules of requests: closed-loop with a fixed concurrency, or open-loop with arrivals at a given rate."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.harness.errors import BenchError
from bench.harness.prompts import Prompt, synthetic
from bench.serve.client import Client, Target
from bench.serve.outcome import Outcome


@dataclass(frozen=True)
class Plan:
    """The schedule of a load.

    concurrency: maximum of concurrent conversations; None for no limit
    rate: arrivals of conversations per second; None starts one as soon as another ends (closed loop)
    burstiness: shape of the gamma distribution of gaps: 1 for Poisson arrivals, below 1 burstier, above 1 more even,
        inf for constant gaps
    seed: of the arrivals; request i has seed + i
    """

    concurrency: int | None = 1
    rate: float | None = None
    burstiness: float = 1.0
    seed: int = 0


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrival times of requests in seconds, the first at 0.

    Gaps are sampled from a gamma distribution of shape `burstiness`, then scaled so that the last arrival is at
    (count - 1) / rate; without scaling, the rate of a few requests would deviate widely.
    """
    rest = max(0, count - 1)
    even = math.isinf(burstiness)
    gaps = np.ones(rest) if even else np.random.default_rng(seed).gamma(burstiness, 1.0 / burstiness, rest)
    times = np.concatenate([[0.0], np.cumsum(gaps / rate)])[:count]
    if count > 1 and times[-1] > 0:
        times *= (count - 1) / rate / times[-1]
    return [float(t) for t in times]


async def warm_up(target: Target, count: int, concurrency: int, seed: int) -> list[Outcome]:
    """Send `count` short synthetic prompts, which share no prefix with later ones. Returns their outcomes."""
    prompts = synthetic(count, 32, 16, 0.5, seed + 0x5EED)
    return await run(target, prompts, Plan(concurrency, seed=seed))


async def run(
    target: Target, prompts: Sequence[Prompt], plan: Plan, done: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run one conversation per prompt. Returns the outcomes of all requests, ordered by conversation."""
    conversations = await run_conversations(target, prompts, plan, done)
    return [outcome for outcomes in conversations for outcome in outcomes]


async def run_conversations(
    target: Target, prompts: Sequence[Prompt], plan: Plan, done: Callable[[Outcome], None] = lambda _: None
) -> list[list[Outcome]]:
    """Run one conversation per prompt. Returns the outcomes of each one's turns, up to the first that fails.

    done: called after each request
    """
    started = time.perf_counter()
    due = [0.0] * len(prompts) if plan.rate is None else arrivals(len(prompts), plan.rate, plan.burstiness, plan.seed)
    gate = asyncio.Semaphore(plan.concurrency or max(1, len(prompts)))

    async with Client(target, lambda: time.perf_counter() - started) as client:

        async def one(index: int) -> list[Outcome]:
            if plan.rate is not None:
                await asyncio.sleep(due[index] - client.clock())
            async with gate:
                # Without a rate, a conversation is due when a slot of the concurrency limit is free.
                begin = due[index] if plan.rate is not None else client.clock()
                return await run_conversation(client, prompts[index], begin, plan.seed + index, done)

        return list(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


def raise_on_failure(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """Return the outcomes. Raises BenchError if a request failed; an empty answer is no failure."""
    for outcome in outcomes:
        if outcome.error and not outcome.empty:
            raise BenchError(f"a request failed: {outcome.error}: {outcome.detail}")
    return outcomes


async def run_conversation(
    client: Client, prompt: Prompt, due: float, seed: int, done: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run one conversation; each turn is due when the answer to the previous one is complete."""
    outcomes: list[Outcome] = []
    messages: list[dict[str, str]] = []
    for turn, text in enumerate(prompt.turns):
        outcome = Outcome(prompt.category, turn, due)
        messages.append({"role": "user", "content": text})
        content: Mapping[str, Any] = {"messages": messages} if client.target.endpoint == "chat" else {"prompt": text}
        length = {"max_tokens": prompt.lengths[turn]} if turn < len(prompt.lengths) else {}
        await client.request(outcome, {"seed": seed, **length, **content})
        outcomes.append(outcome)
        done(outcome)
        if outcome.error and not outcome.empty:
            break
        messages.append({"role": "assistant", "content": outcome.content})
        due = client.clock()
    return outcomes
