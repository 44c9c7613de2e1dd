"""Who asks when: a fixed number of users who each wait for their answer, or arrivals that wait for nobody."""

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
    """How a load is put on.

    concurrency: most conversations at a time; None for no limit
    rate: conversations that begin in a second; None: as soon as another one has ended
    burstiness: 1 for Poisson arrivals, below 1 for bursts, above 1 for even ones, infinite for those without chance
    seed: of arrivals; request i asks for seed + i
    """

    concurrency: int | None = 1
    rate: float | None = None
    burstiness: float = 1.0
    seed: int = 0


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When requests come, in seconds, the first at 0.

    Gaps are drawn from a gamma distribution of shape `burstiness` and scaled so that the last request comes when the
    rate says; with few requests the load would otherwise be off by much.
    """
    rest = max(0, count - 1)
    even = math.isinf(burstiness)
    gaps = np.ones(rest) if even else np.random.default_rng(seed).gamma(burstiness, 1.0 / burstiness, rest)
    times = np.concatenate([[0.0], np.cumsum(gaps / rate)])[:count]
    if count > 1 and times[-1] > 0:
        times *= (count - 1) / rate / times[-1]
    return [float(t) for t in times]


async def warm_up(target: Target, count: int, concurrency: int, seed: int) -> list[Outcome]:
    """Ask for short answers about random words, which no later prompt has in it. Returns what came of it."""
    prompts = synthetic(count, 32, 16, 0.5, seed + 0x5EED)
    return await run(target, prompts, Plan(concurrency, seed=seed))


async def run(
    target: Target, prompts: Sequence[Prompt], plan: Plan, done: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Hold a conversation over each prompt. Returns what came of every request, conversation by conversation."""
    return [outcome for talk in await hold(target, prompts, plan, done) for outcome in talk]


async def hold(
    target: Target, prompts: Sequence[Prompt], plan: Plan, done: Callable[[Outcome], None] = lambda _: None
) -> list[list[Outcome]]:
    """Hold a conversation over each prompt. Returns what came of its turns, for each; one that fails is the last.

    done: called after every request.
    """
    started = time.perf_counter()
    due = [0.0] * len(prompts) if plan.rate is None else arrivals(len(prompts), plan.rate, plan.burstiness, plan.seed)
    gate = asyncio.Semaphore(plan.concurrency or max(1, len(prompts)))

    async with Client(target, lambda: time.perf_counter() - started) as client:

        async def one(index: int) -> list[Outcome]:
            if plan.rate is not None:
                await asyncio.sleep(due[index] - client.clock())
            async with gate:
                # Without a rate a conversation is due when its user is free.
                begin = due[index] if plan.rate is not None else client.clock()
                return await converse(client, prompts[index], begin, plan.seed + index, done)

        return list(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


def checked(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """The same. Raises BenchError if a request failed; a model that had nothing to say did not."""
    for outcome in outcomes:
        if outcome.error and not outcome.silent:
            raise BenchError(f"a request failed: {outcome.error}: {outcome.detail}")
    return outcomes


async def converse(
    client: Client, prompt: Prompt, due: float, seed: int, done: Callable[[Outcome], None]
) -> list[Outcome]:
    """Hold one conversation; every turn is due when the answer before it is complete."""
    outcomes: list[Outcome] = []
    messages: list[dict[str, str]] = []
    for turn, text in enumerate(prompt.turns):
        outcome = Outcome(prompt.category, turn, due)
        messages.append({"role": "user", "content": text})
        asked: Mapping[str, Any] = {"messages": messages} if client.target.endpoint == "chat" else {"prompt": text}
        length = {"max_tokens": prompt.lengths[turn]} if turn < len(prompt.lengths) else {}
        await client.ask(outcome, {"seed": seed, **length, **asked})
        outcomes.append(outcome)
        done(outcome)
        if outcome.error and not outcome.silent:
            break
        messages.append({"role": "assistant", "content": outcome.content})
        due = client.clock()
    return outcomes
