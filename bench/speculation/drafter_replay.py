"""Replay of recorded answers through one draft engine on one core, for `outrider bench drafters`.

`python -m bench.speculation.drafter_replay` reads a request in JSON from stdin, and prints the result in JSON. It is a
process of its own, because JAX and the compiled kernels read their number of threads when they are loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from outrider.config import DraftConfig, read_flags
from outrider.errors import ConfigError, OutriderError
from outrider.process.process import take_cores
from outrider.serving.features import FeatureBlock, FeatureSpec
from outrider.serving.messages import OpenSession, StepOutput
from outrider.speculation.proposal import Commit, Proposal
from outrider.speculation.shape import TreeShape

if TYPE_CHECKING:
    from services.draft.drafters.base import Drafter
    from services.draft.engine.engine import DraftEngine
    from services.draft.learning.records.store import Reader, Record

_FIRST = 2  # commits of a session that are not timed: those behind the prompt
_DEEPEST = TreeShape(steps=18, topk=1, rows=16)  # of drafters without an explicit tree; bounds the counts alone

_T = TypeVar("_T")


@dataclass(frozen=True)
class Request:
    """flags: of `outrider draft`; model: the target; answers: folder of a store; jobs: of the answers to replay"""

    flags: list[str]
    model: str
    answers: str
    jobs: list[int]


@dataclass(frozen=True)
class Result:
    """accept: accept length by temperature; seconds: median and 90th percentile of a proposal; passes: of the model in
    a proposal; weights: bytes that a pass reads
    """

    accept: dict[str, float]
    seconds: tuple[float, float]
    passes: int
    weights: int


def main() -> int:
    """Replay what stdin requests. Returns the exit code."""
    try:
        request = Request(**json.load(sys.stdin))
        take_cores(str(max(os.sched_getaffinity(0))))
        print(json.dumps(asdict(measure(request))))
    except OutriderError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


class TimedEngine:
    """A draft engine, and the time that it spends on each proposal: from a commit until its tree is complete."""

    def __init__(self, engine: DraftEngine) -> None:
        self.proposals: list[float] = []
        self._engine = engine
        self._spent, self._untimed = 0.0, 0

    @property
    def idle(self) -> bool:
        """As of DraftEngine."""
        return self._engine.idle

    def open(self, request: OpenSession) -> None:
        """As of DraftEngine."""
        self._untimed = _FIRST
        self._engine.open(request)

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        """As of DraftEngine; the proposal before the commits is complete."""
        if self._untimed:
            self._untimed -= 1
        else:
            self.proposals.append(self._spent)
        self._spent = 0.0
        self._timed(lambda: self._engine.receive(proposals, commits))

    def receive_features(self, blocks: Sequence[FeatureBlock]) -> None:
        """As of DraftEngine."""
        self._timed(lambda: self._engine.receive_features(blocks))

    def step(self) -> StepOutput:
        """As of DraftEngine."""
        return self._timed(self._engine.step)

    def _timed(self, call: Callable[[], _T]) -> _T:
        start = time.perf_counter()
        result = call()
        self._spent += time.perf_counter() - start
        return result


def measure(request: Request) -> Result:
    """Replay the answers one at a time. Raises OutriderError."""
    import jax
    import numpy as np

    from outrider.checkpoints import checkpoint
    from outrider.drafts import resolve_drafter
    from services.draft.formats.target import read_target
    from services.draft.learning.records.store import Store
    from services.draft.process.app import build
    from services.draft.process.checkpoints import draft_folder
    from services.draft.process.flags import tree_shape
    from services.draft.train.evaluate import feature_function, replay_through

    own = ["--model-path", request.model, "--max-running-requests", "1", "--draft-feature-dtype", "float32"]
    config, _ = read_flags(DraftConfig, [*request.flags, *own], "outrider draft")
    config = resolve_drafter(config, config.model_path)
    engine = build(config)[0]
    for drafter in engine.drafters:
        drafter.warm_up()
    about = json.loads((Path(request.answers) / "about.json").read_text())
    store = Store(Path(request.answers), about, about.pop("row_bytes"))
    store.close()
    drafter, feed = engine.drafter, None
    if drafter.features is not None:
        fuse = feature_function(drafter, draft_folder(config))
        layers = read_target(checkpoint.resolve(request.model)).layers
        wanted = columns(drafter.features, about["layers"], layers, store.row_bytes // 2)
        assert fuse is not None
        feed = lambda states: fuse(np.ascontiguousarray(states[:, wanted]))  # noqa: E731
    timed, shape = TimedEngine(engine), tree_shape(config) or _DEEPEST
    scores = replay_through(timed, feed, records(store.read(), request.jobs), shape, batch=1)
    median, high = np.percentile(timed.proposals, (50, 90)).tolist()
    weights = 0
    if (runner := getattr(drafter, "runner", None)) is not None:
        read = {name: value for name, value in runner.params.items() if name != "embed"}
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(read))
    accept = {f"{temperature:g}": score.accept_length for temperature, score in sorted(scores.items())}
    return Result(accept, (median, high), passes_of(drafter, shape) if weights else 0, weights)


def records(reader: Reader, jobs: list[int]) -> list[Record]:
    """The answers of jobs that have tokens to draft."""
    wanted = set(jobs)
    found = (reader.record(i) for i, job in enumerate(reader.entries["job"].tolist()) if job in wanted)
    return [record for record in found if record.learnt > _FIRST]


def columns(spec: FeatureSpec, stored: Sequence[int], layers: int, width: int) -> list[int]:
    """Columns of the stored states that a drafter reads. stored: layers whose outputs they are; the last state follows.

    layers: of the target; width: of a stored row. Raises ConfigError for states that are not stored.
    """
    size = width // (len(stored) + 1)
    wanted = [] if spec.final else list(spec.layers or (2, layers // 2, layers - 3))
    if missing := sorted(set(wanted) - set(stored)):
        raise ConfigError(
            f"the drafter reads layers {', '.join(str(layer - 1) for layer in missing)} of the target, which the "
            "answers lack; name them with --aux-layers, and another --answers"
        )
    places = [*(list(stored).index(layer) for layer in wanted), len(stored)]
    return [column for place in places for column in range(place * size, (place + 1) * size)]


def passes_of(drafter: Drafter, shape: TreeShape) -> int:
    """Passes of a drafter's model in a proposal: one, or one for each level of the tree."""
    return 1 if drafter.one_pass else shape.steps


if __name__ == "__main__":
    sys.exit(main())
