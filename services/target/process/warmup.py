"""Warm-up before the first request: runs every kind of step once and measures the cost of steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from outrider.process.startup import STARTUP
from outrider.serving.messages import OpenSession
from outrider.speculation.proposal import Proposal
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.speculation.tree import TreeSlice
from services.target.engine.engine import TargetEngine
from services.target.model.cuda.graphs import GraphRunner
from services.target.process.ranks.leading import LeadingRunner
from services.target.speculation.budget import Budget, Selection
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.mode_selector import SpeculationMode

log = logging.getLogger(__name__)

_ID = 0
_TIMED_STEPS = 3
_TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_PREPARED = 8  # tokens generated with proposals
_DRAFTED = 24  # tokens generated with the model's own draft source, several chains
_LENGTHS = (64, 1024)  # tokens of a short and of a long context


def warm_up(engine: TargetEngine) -> None:
    """Run an idle engine, so that the first request does not pay for lazy initialisation."""
    engine.sessions.grammars.load()
    with step_by_step(engine):
        _run(engine)
    if engine.prepares:
        _try_prepared_steps(engine)
    engine.forget_measurements()
    chooser = engine.speculation.chooser
    if chooser is not None and chooser.source is not None:
        chooser.looks_up, chooser.always = False, True  # the model source is to be measured
        _open(engine, min(4, engine.max_session_tokens - 1), _DRAFTED, SamplingParams(temperature=0.0))
        while not engine.idle:
            engine.step()
        chooser.looks_up, chooser.always = True, False
        engine.forget_measurements()
    STARTUP.done("warm-up")


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


def _run(engine: TargetEngine) -> None:
    if isinstance(engine.model.runner, GraphRunner | LeadingRunner):
        engine.model.runner.capture(engine.cache, engine.model.device)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9)):
        _open(engine, min(4, engine.max_session_tokens - 1), 3, params)
        while not engine.idle:
            _draft_chain(engine, 2)
            engine.step()
    STARTUP.done("warm-up")
    cost = _measure(engine)
    STARTUP.done("costs of steps")
    if cost is not None:
        engine.speculation.planner.budget = Budget(cost)
        log.info("%s", cost.describe())


def _try_prepared_steps(engine: TargetEngine) -> None:
    """Run steps that the device prepares, which compiles their kernels. Where these fail, steps go one by one."""
    planner = engine.speculation.planner
    budget, planner.budget = planner.budget, Measuring()  # draft tokens are verified at any cost
    try:
        with engine.speculation.only(SpeculationMode.DRAFT_IF_READY):
            for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)):
                _open(engine, min(4, engine.max_session_tokens - 1), _PREPARED, params)
                while not engine.idle:
                    _propose(engine)
                    engine.step()
    except Exception as error:  # of another version of Triton, say
        engine.close(_ID)
        engine.prepares = False
        log.warning("steps with draft tokens do not overlap: %s", (str(error) or repr(error)).splitlines()[0])
    finally:
        planner.budget = budget


def _propose(engine: TargetEngine) -> None:
    """Send a chain for two steps below the session's root."""
    if _ID in engine.sessions.by_id:
        tree, count = engine.draft_tree(_ID), 2 * engine.speculation.planner.max_tokens
        parents, scores = np.arange(-1, count - 1, dtype=np.int32), np.full(count, -0.1, np.float32)
        tokens = np.zeros(count, np.uint32)
        engine.receive([Proposal(_ID, tree.length, tree.root_hash, tokens, parents, scores, tree.length)], ())


def _open(engine: TargetEngine, prompt: int, max_tokens: int, params: SamplingParams) -> None:
    stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    engine.open(OpenSession(_ID, np.zeros(prompt, np.uint32), prompt, params, stop))


def _draft_chain(engine: TargetEngine, nodes: int) -> None:
    tree = engine.draft_tree(_ID)
    tree.clear()
    for depth in range(nodes):
        tree.add(depth - 1, 0, 0.0)  # below the node added last, or below the root


def _measure(engine: TargetEngine) -> StepCost | None:
    """Time steps of several sizes, and of a long context. None if the cache is too small."""
    counts = [count for count in _TOKENS if count <= engine.max_session_tokens // 4]
    seconds = dict.fromkeys(counts, np.inf)
    short, long = _LENGTHS[0], min(_LENGTHS[1], engine.max_session_tokens // 2)
    if len(counts) < 2 or long < 2 * short:
        return None
    planner = engine.speculation.planner
    planner.budget, most = Measuring(), planner.max_tokens
    try:
        for _ in range(_TIMED_STEPS):
            for count in counts:
                planner.max_tokens = count
                seconds[count] = min(seconds[count], _timed(engine, short, count))
        planner.max_tokens = 1
        with_context = min(_timed(engine, long, 1) for _ in range(_TIMED_STEPS))
    finally:
        planner.max_tokens = most
    return StepCost(seconds, max(0.0, with_context - seconds[1]) / (long - short))


def _timed(engine: TargetEngine, kv_tokens: int, tokens: int) -> float:
    """Seconds of a step with some tokens of a session that has a context of `kv_tokens`."""
    _open(engine, kv_tokens, tokens + 2, SamplingParams(temperature=0.0))
    while not engine.step().commits:
        pass
    _draft_chain(engine, tokens - 1)
    start = time.perf_counter()
    engine.step()
    elapsed = time.perf_counter() - start
    engine.close(_ID)
    return elapsed


class Measuring(Budget):
    """Takes all draft tokens."""

    def select(self, drafts: Sequence[TreeSlice], *_: Any, **__: Any) -> Selection:
        """All tokens of all drafts."""
        return Selection([len(draft) for draft in drafts], 0.0)
