"""Runs the draft model: holds weights and KV pools, compiles each shape once, and measures what a step costs."""

from __future__ import annotations

import logging
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from outrider.telemetry import Progress, no_progress
from services.draft.kernels.base import Backend, Paging
from services.draft.model.fusion import Fusion, compiled_fusion
from services.draft.model.layers.config import ModelConfig
from services.draft.model.layers.heads import Params
from services.draft.model.layers.kv_cache import make_pools
from services.draft.model.parallel.mesh import Spread
from services.draft.model.programs import program
from services.draft.model.programs.compilations import Compilations
from services.draft.sessions.batch import Blank, Layout, Shape, StepInputs, empty_inputs

log = logging.getLogger(__name__)

_MOVES = 64  # rows that the separate move program copies at a time
_TRIALS = 4
# Seconds that a round takes beside its program: wishes, inputs, trees (docs/benchmarks/draft-steps.md).
_AROUND = 0.2e-3
# Cost of a row relative to a step's own, where nothing has been measured.
_GUESSED_ROW_COST = 0.1


class ModelRunner:
    """The device's only user. `compilations` counts what is compiled in this process."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        dtype: Any,
        total_pages: int,
        paging: Paging,
        table_pages: int,
        children: int,
        vocab_limit: int,
        spread: Spread | None = None,
        fusion: Fusion | None = None,
        fusion_params: Params | None = None,
    ) -> None:
        """table_pages: pages of the longest session. children: candidates a row. vocab_limit: ids below are real.

        spread: where the parameters lie, if on several devices; config is then a device's part of the model
        fusion, fusion_params: what makes features of the target's states, if the target does not do it itself
        """
        self.config = config
        self._dtype = jnp.dtype(dtype)
        self.page_size = paging.page_size
        self.table_pages = table_pages
        self.compilations = Compilations()
        self._constants = program.Constants(config, paging, children, vocab_limit, spread)
        self._step = program.compiled_step(paging.backend)
        self._fuse = compiled_fusion(paging.backend)
        self._fusion, self._fusion_params = fusion, fusion_params or {}
        self._params = params
        make = make_pools if spread is None else spread.make_pools
        self._pools = make(config, total_pages, paging.page_size, dtype)
        if paging.backend == "cpu":  # bound to the device, as weights in memory of ours are: else programs differ
            self._pools = jax.device_put(self._pools, jax.local_devices(backend="cpu")[0])
        self._seconds: dict[Shape, float] = {}
        self._zeros: dict[Shape, jax.Array] = {}
        self._blanks: dict[Shape, Blank] = {}

    @property
    def backend(self) -> Backend:
        """What computes attention."""
        return self._constants.paging.backend

    @property
    def children(self) -> int:
        """Candidates a row."""
        return self._constants.children

    @property
    def feature_width(self) -> int:
        """Numbers that a row is fed with, a feature or the states that make one; 0 for models that are not fed."""
        if self._fusion is not None:
            return self._fusion.width
        return self.config.hidden_size if self.config.head.fed else 0

    def install(self, params: Params, fusion_params: Params | None = None) -> None:
        """Compute with other weights from now on, such as those that there are; None leaves a fusion as it is."""
        self._params = params
        if fusion_params is not None:
            self._fusion_params = fusion_params

    @property
    def stacked(self) -> int:
        """Layers that stand side by side; 0 for other models."""
        return len(self.config.layers) if self.config.stacked else 0

    def warm_up(self, shapes: list[Shape], tell: Progress = no_progress) -> None:
        """Compile every shape and measure it. tell: called before each one."""
        start = time.perf_counter()
        self.move([(0, 0)])
        for done, shape in enumerate(shapes, start=1):
            tell(done, len(shapes))
            padding = empty_inputs(self.layout(shape))
            if self._fusion is not None:
                assert padding.features is not None
                padding.features.given[:] = 1
                self._run(shape, padding)
                padding.features.given[:] = 0
            self._run(shape, padding)
            self._seconds[shape] = min(self._trial(shape, padding) for _ in range(_TRIALS))
            self._even_out()
            log.info("shape %d of %d: %s takes %.1f ms", done, len(shapes), _name(shape), 1e3 * self._seconds[shape])
        self.compilations.serve()
        log.info("warmed up in %.1f s, %d programs compiled", time.perf_counter() - start, self.compilations.total)

    def _even_out(self) -> None:
        # A smaller step cannot truly cost more than a larger one: what says so was disturbed by other processes.
        for small in self._seconds:
            alike = [s for s in self._seconds if s.tree == small.tree]
            larger = [s for s in alike if s.sessions >= small.sessions and s.rows >= small.rows]
            self._seconds[small] = min(self._seconds[shape] for shape in larger)

    def cost(self, shape: Shape) -> float:
        """Seconds that a round of a shape takes; before it is measured, a guess in no particular unit."""
        if shape not in self._seconds:
            return 1 + _GUESSED_ROW_COST * shape.sessions * shape.rows
        return self._seconds[shape] + _AROUND

    def run(self, shape: Shape, inputs: StepInputs) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """One step. Returns candidates [S, R, K] and their log-scores [S, R, K]; the only wait for the device."""
        ids, log_scores = self._run(shape, inputs)
        return ids, log_scores.view(np.float32)

    def grow(
        self, shape: Shape, inputs: StepInputs
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """One step and the whole tree below it. Returns tokens, parents and log-scores of its nodes, [S, nodes] each.

        parents: index among the nodes; -1 is the root
        """
        tokens, parents, log_scores = self._run(shape, inputs)
        return tokens, parents, log_scores.view(np.float32)

    def _run(self, shape: Shape, inputs: StepInputs) -> NDArray[np.int32]:
        assert inputs.tokens.shape == shape[:2]
        self.compilations.doing = _name(shape)
        features = self._no_features(shape)
        if inputs.features is not None and inputs.features.given.any():
            features = inputs.features.rows
            if self._fusion is not None:
                features = self._fuse(self._fusion, self._dtype, self._fusion_params, features)
        words = inputs.tokens.base  # of which all inputs are views
        result, self._pools = self._step(
            self._constants, self.layout(shape), self._params, self._pools, words, features
        )
        return np.asarray(result)

    def layout(self, shape: Shape) -> Layout:
        """Where the inputs of a shape stand."""
        return Layout(shape, self.table_pages, self.feature_width, self.stacked)

    def blank(self, shape: Shape) -> Blank:
        """What a step of a shape is described on."""
        if shape not in self._blanks:
            self._blanks[shape] = Blank(self.layout(shape))
        return self._blanks[shape]

    def _no_features(self, shape: Shape) -> jax.Array:
        """Rows for steps in which none is the target's, on the device."""
        if shape not in self._zeros:
            width = self.config.hidden_size if self.feature_width else 0
            self._zeros[shape] = jnp.zeros((shape.sessions, shape.rows, width), jnp.float32)
        return self._zeros[shape]

    def move(self, moves: list[tuple[int, int]]) -> None:
        """Copy rows between slots, (source, target) each, without a step."""
        for start in range(0, len(moves), _MOVES):
            part = moves[start : start + _MOVES]
            padded = np.zeros((2, _MOVES), dtype=np.int32)
            padded[:, : len(part)] = np.array(part, dtype=np.int32).T
            self.compilations.doing = f"{len(moves)} moves"
            self._pools = program.move(self._constants.spread, self._pools, padded)

    def _trial(self, shape: Shape, inputs: StepInputs) -> float:
        start = time.perf_counter()
        self._run(shape, inputs)
        return time.perf_counter() - start


def _name(shape: Shape) -> str:
    step = f"a step of {shape.sessions} x {shape.rows} rows"
    return step if shape.tree is None else f"{step} and the trees below"
