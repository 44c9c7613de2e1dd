"""Before the first request: every kind of step is run once, and the cost of a draft row is measured."""

from __future__ import annotations

import logging
import time

import numpy as np

from outrider.serving.messages import OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions
from services.target.budget import row_share
from services.target.engine import TargetEngine
from services.target.graphs import GraphRunner

log = logging.getLogger(__name__)

_ID = 0
_TIMED_STEPS = 5
_TIMED_PROMPT = 64  # tokens


def warm_up(engine: TargetEngine) -> None:
    """Run an idle engine, so that the first request does not pay for what is done lazily."""
    engine.grammars.load()
    if isinstance(engine.model.runner, GraphRunner):
        engine.model.runner.capture(engine.cache, engine.model.device)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9)):
        _open(engine, min(4, engine.max_session_tokens - 1), 3, params)
        while not engine.idle:
            _draft_chain(engine, 2)
            engine.step()
    _measure_rows(engine)
    engine.forget_measurements()


def _open(engine: TargetEngine, prompt: int, max_tokens: int, params: SamplingParams) -> None:
    stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    engine.open(OpenSession(_ID, np.zeros(prompt, np.uint32), prompt, params, stop))


def _draft_chain(engine: TargetEngine, nodes: int) -> None:
    tree = engine.hints(_ID)
    tree.clear()
    for depth in range(nodes):
        tree.add(depth - 1, 0, 0.0)  # below the node added last, or below the root


def _measure_rows(engine: TargetEngine) -> None:
    """Time steps with and without draft rows, to know what a row costs."""
    rows = engine.max_rows
    tokens = 4 * rows * _TIMED_STEPS
    if rows < 2 or engine.max_session_tokens < _TIMED_PROMPT + tokens:
        return
    _open(engine, _TIMED_PROMPT, tokens - 1, SamplingParams(temperature=0.0))
    while not engine.step().commits:
        pass
    seconds: dict[bool, float] = {}
    for _ in range(_TIMED_STEPS):
        for drafted in (False, True):
            _draft_chain(engine, rows - 1 if drafted else 0)
            start = time.perf_counter()
            engine.step()
            elapsed = time.perf_counter() - start
            seconds[drafted] = min(elapsed, seconds.get(drafted, elapsed))
    engine.close(_ID)
    engine.row_share = row_share(seconds[False], seconds[True], rows - 1)
    log.info(
        "a plain step takes %.1f ms, one with %d rows %.1f ms; draft nodes below probability %.3f do not pay",
        1e3 * seconds[False],
        rows,
        1e3 * seconds[True],
        engine.row_share,
    )
