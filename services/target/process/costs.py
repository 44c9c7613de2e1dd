"""Measures what a step costs, by the tokens in it and by its context, on an idle engine.

The contexts of the measured sessions are not computed for a compiled program: their pages are zeros, which take as
long to read. Such pages never serve a session: the prefix cache has them under a name of their own, and is flushed
afterwards.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from outrider.process.startup import STARTUP
from outrider.serving.messages import OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.speculation.tree import TreeSlice
from services.target.engine.engine import TargetEngine
from services.target.kernels.pools import indexable
from services.target.model.native import ProgramRunner
from services.target.speculation.budget import Budget, Selection
from services.target.speculation.estimates.step_cost import StepCost

SESSION = 0
"""Id of the sessions of the warm-up."""

_TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_LENGTHS = (64, 1024)  # tokens of a short and of a long context
# Passes that may follow where other work, such as a second service that starts, slowed steps down; and the ratio to a
# step with more tokens that is noise.
_MORE_PASSES, _NOISE = 2, 1.1


class Point(NamedTuple):
    """A kind of step: the context of its session, and its tokens."""

    kv_tokens: int
    tokens: int


class CostMeter:
    """Times steps of an engine. Each point counts with its fastest step, because other work only slows steps down.

    points: to measure; none if the cache is too small
    """

    def __init__(self, engine: TargetEngine) -> None:
        self._engine = engine
        counts = [count for count in _TOKENS if count <= engine.sessions.longest // 4]
        short, self._long = _LENGTHS[0], min(_LENGTHS[1], engine.sessions.longest // 2)
        fits = len(counts) > 1 and self._long >= 2 * short
        self._short = short
        self.points = [*(Point(short, count) for count in counts), Point(self._long, 1)] if fits else []
        self.seconds = dict.fromkeys(self.points, math.inf)
        self._computes = not isinstance(engine.model.runner, ProgramRunner)

    def measure(self, passes: int) -> StepCost | None:
        """Time all points, several times, and some times more if other work slowed them. None if there are none."""
        for number in range(passes + _MORE_PASSES):
            if number >= passes and not self.disturbed:
                break
            for i, point in enumerate(self.points):
                STARTUP.report(
                    "measuring costs", min(number, passes - 1) * len(self.points) + i, passes * len(self.points)
                )
                self.time(point)
        return self.cost() if self.complete else None

    @property
    def disturbed(self) -> bool:
        """True if steps took longer than others with more tokens, which only other work on the machine explains."""
        short = [seconds for point, seconds in self.seconds.items() if point.kv_tokens == self._short]
        return any(fewer > _NOISE * more for fewer, more in pairwise(short))

    @property
    def complete(self) -> bool:
        """True if all points were timed, and there are some."""
        return bool(self.points) and all(map(math.isfinite, self.seconds.values()))

    def cost(self) -> StepCost:
        """The cost model of the timed steps. The meter must be complete."""
        seconds = {point.tokens: time for point, time in self.seconds.items() if point.kv_tokens == self._short}
        context = self.seconds[Point(self._long, 1)] - seconds[1]
        return StepCost(seconds, max(0.0, context) / (self._long - self._short))

    def time(self, point: Point) -> None:
        """Time a step."""
        planner = self._engine.speculation.planner
        budget, most = planner.budget, planner.max_tokens
        planner.budget, planner.max_tokens = Measuring(), point.tokens
        try:
            self.seconds[point] = min(self.seconds[point], self._timed(*point))
        finally:
            planner.budget, planner.max_tokens = budget, most

    def _timed(self, kv_tokens: int, tokens: int) -> float:
        engine = self._engine
        open_session(engine, kv_tokens, tokens + 2, SamplingParams(temperature=0.0), salt=secrets.token_hex(16))
        if not self._computes:
            self._leave_uncomputed(kv_tokens - 1)
        while not (output := engine.step()).commits:
            if output.failures:  # no token can be sampled with these weights
                return math.inf
        draft_chain(engine, tokens - 1)
        start = time.perf_counter()
        engine.step()
        elapsed = time.perf_counter() - start
        engine.sessions.close(SESSION, trusted=False)
        return elapsed

    def _leave_uncomputed(self, kv_tokens: int) -> None:
        """Give the open session a context of zeros."""
        session, cache = self._engine.sessions.by_id[SESSION].session, self._engine.cache
        session.table.reserve(kv_tokens)
        for pool in (*cache.keys, *cache.values):
            for page in session.table.pages.tolist():
                indexable(pool)[page].zero_()
        session.computed = kv_tokens


class Measuring(Budget):
    """Takes all draft tokens."""

    def select(self, drafts: Sequence[TreeSlice], *_: Any, **__: Any) -> Selection:
        """All tokens of all drafts."""
        return Selection([len(draft) for draft in drafts], 0.0)


@contextmanager
def step_by_step(engine: TargetEngine) -> Iterator[None]:
    """Disable overlap and multi-step decoding, so that each step can be timed."""
    speculation = engine.speculation
    overlap, engine.overlap = engine.overlap, False
    window, speculation.multi_step.window = speculation.multi_step.window, 0.0
    service_only, speculation.service_only = speculation.service_only, True
    try:
        yield
    finally:
        engine.overlap, speculation.multi_step.window, speculation.service_only = overlap, window, service_only


def open_session(engine: TargetEngine, prompt: int, max_tokens: int, params: SamplingParams, *, salt: str = "") -> None:
    """Open the session of the warm-up. prompt: its tokens. salt: name of its prefixes in the cache."""
    stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    engine.open(OpenSession(SESSION, np.zeros(prompt, np.uint32), prompt, params, stop, cache_salt=salt))


def draft_chain(engine: TargetEngine, nodes: int) -> None:
    """Give the session a draft chain."""
    tree = engine.sessions.by_id[SESSION].tree
    tree.clear()
    for depth in range(nodes):
        tree.add(depth - 1, 0, 0.0)  # below the node added last, or below the root
