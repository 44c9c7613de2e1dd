"""The draft service with clocks and, for a random head, with simulated acceptance.

`python -m bench.gpu.system.draft OPTIONS.json FLAGS...`. The options are a JSON object with `folder`, for recordings,
and `simulated`: null for a drafter as it is, else an object with `first` and `size` of the known text, and
`accept_lengths`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bench.gpu.system.recording import Recorder
from services.draft.process import app

if TYPE_CHECKING:
    from services.draft.drafters.model import ModelDrafter
    from services.draft.engine.engine import DraftEngine
    from services.draft.sessions.batch import StepInputs, StepShape

_TRIALS = 20


class ProgramClock:
    """Times the programs of a draft model, and their dispatch, by an empty program with equal inputs."""

    def __init__(self, drafter: ModelDrafter, recorder: Recorder) -> None:
        self._runner, self._recorder = drafter.runner, recorder
        self._dispatch = {shape: self._dispatch_seconds(shape) for shape in drafter.shapes}
        for method in ("run", "run_tree"):
            vars(self._runner)[method] = partial(self._timed, getattr(self._runner, method))

    def _timed(self, run: Any, shape: StepShape, inputs: StepInputs) -> Any:
        start = time.perf_counter()
        result = run(shape, inputs)
        self._recorder.rows["run"].append((start, time.perf_counter(), self._dispatch[shape]))
        return result

    def _dispatch_seconds(self, shape: StepShape) -> float:
        import jax
        import jax.numpy as jnp
        import numpy as np

        from services.draft.sessions.batch import empty_inputs

        runner = self._runner
        words = empty_inputs(runner.layout(shape)).tokens.base

        def empty(params: Any, pools: Any, words: Any) -> Any:
            del params, words
            return jnp.zeros((2, shape.sessions, shape.heads, runner.children), jnp.int32), pools

        compiled = jax.jit(empty, donate_argnums=1, keep_unused=True)
        seconds = []
        for _ in range(_TRIALS + 1):
            start = time.perf_counter()
            result, runner.pools = compiled(runner.params, runner.pools, words)
            np.asarray(result)
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:])


def main(options: dict[str, Any], flags: Sequence[str]) -> int:
    """Run the service. Returns its exit code."""
    recorder = Recorder(Path(options["folder"]), "draft")

    def prepare(engine: DraftEngine) -> None:
        from bench.gpu.system.acceptance import SimulatedAcceptance
        from bench.gpu.system.continuation import Continuation
        from services.draft.drafters.model import ModelDrafter
        from services.draft.sessions.batch import Growth

        if isinstance(engine.drafter, ModelDrafter):
            ProgramClock(engine.drafter, recorder)
        if (simulated := options["simulated"]) is not None:
            text = Continuation(simulated["first"], simulated["size"])
            drafter, shape = cast("ModelDrafter", engine.drafter), engine.limits.shape
            growths = [one.tree for one in drafter.shapes if isinstance(one.tree, Growth)]
            children = drafter.runner.children
            SimulatedAcceptance(text, simulated["accept_lengths"], children, shape, growths).attach(drafter)
        recorder.watch(engine)

    return app.main(flags, prepare)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
