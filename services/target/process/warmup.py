"""Warm-up before the first request: runs every kind of step once, and measures the cost of steps unless it is known."""

from __future__ import annotations

import logging

import numpy as np

from outrider.process.startup import STARTUP
from outrider.speculation.proposal import Proposal
from outrider.speculation.sampling import SamplingParams
from services.target.engine.engine import TargetEngine
from services.target.model.base import CapturesAhead
from services.target.process.costs import SESSION, Measuring, draft_chain, open_session, step_by_step
from services.target.process.kept_costs import KeptCosts, starting_cost
from services.target.speculation.budget import Budget
from services.target.speculation.modes.mode import SpeculationMode

log = logging.getLogger(__name__)

_TIMED_STEPS = 3
_PREPARED = 8  # tokens generated with proposals
_DRAFTED = 24  # tokens generated with the model's own draft source, several chains


def warm_up(engine: TargetEngine, kept: KeptCosts | None = None) -> None:
    """Run an idle engine, so that the first request does not pay for lazy initialisation.

    kept: the file with the costs of its steps; None measures them
    """
    with step_by_step(engine):
        _run(engine, kept)
    if engine.launcher.prepares:
        _try_prepared_steps(engine)
    engine.forget_measurements()
    chooser = engine.speculation.chooser
    if chooser is not None and chooser.source is not None:
        chooser.looks_up, chooser.always = False, True  # the model source is to be measured
        open_session(engine, min(4, engine.sessions.longest - 1), _DRAFTED, SamplingParams(temperature=0.0))
        while not engine.idle:
            engine.step()
        chooser.looks_up, chooser.always = True, False
        engine.forget_measurements()
    STARTUP.done("warm-up")


def _run(engine: TargetEngine, kept: KeptCosts | None) -> None:
    if isinstance(engine.model.runner, CapturesAhead):
        engine.model.runner.capture(engine.cache, engine.model.device)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9)):
        open_session(engine, min(4, engine.sessions.longest - 1), 3, params)
        while not engine.idle:
            draft_chain(engine, 2)
            engine.step()
    STARTUP.done("warm-up")
    cost = starting_cost(engine, kept, _TIMED_STEPS)
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
                open_session(engine, min(4, engine.sessions.longest - 1), _PREPARED, params)
                while not engine.idle:
                    _propose(engine)
                    engine.step()
    except Exception as error:  # of another version of Triton, say
        engine.close(SESSION)
        engine.launcher.prepares = False
        log.warning("steps with draft tokens do not overlap: %s", (str(error) or repr(error)).splitlines()[0])
    finally:
        planner.budget = budget


def _propose(engine: TargetEngine) -> None:
    """Send a chain for two steps below the session's root."""
    if SESSION in engine.sessions.by_id:
        tree, count = engine.sessions.by_id[SESSION].tree, 2 * engine.speculation.planner.max_tokens
        parents, scores = np.arange(-1, count - 1, dtype=np.int32), np.full(count, -0.1, np.float32)
        tokens = np.zeros(count, np.uint32)
        engine.receive([Proposal(SESSION, tree.length, tree.root_hash, tokens, parents, scores, tree.length)], ())
