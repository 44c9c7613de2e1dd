"""Runs the draft model: owns weights and KV pools, compiles each shape once, and measures the cost of its steps."""

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
from services.draft.model.layers.kv_cache import make_pools
from services.draft.model.parallel.mesh import MeshPlacement
from services.draft.model.params import Params
from services.draft.model.programs import program
from services.draft.model.programs.compilations import Compilations
from services.draft.sessions.batch import InputLayout, StepBuffer, StepInputs, StepShape, empty_inputs

log = logging.getLogger(__name__)

_MOVES = 64  # slots that the separate move program copies at a time
_TRIALS = 4
# Seconds of a step outside of its program: requests, inputs, trees (docs/benchmarks/draft-steps.md).
_HOST_SECONDS = 0.2e-3
# Cost of a row relative to the fixed cost of a step, before measurements.
_DEFAULT_ROW_COST = 0.1


class ModelRunner:
    """Owns the device. `compilations` counts the programs that this process compiles."""

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
        placement: MeshPlacement | None = None,
        fusion: Fusion | None = None,
        fusion_params: Params | None = None,
        feature_dtype: Any = np.float32,
    ) -> None:
        """table_pages: pages of the longest session. children: candidates a row. vocab_limit: ids from there on are
        padding. feature_dtype: in which the target's features, or the states that the fusion reads, are handed over

        spread: placement of the parameters on several devices, or None; config is then a device's part of the model
        fusion, fusion_params: the layer that makes features from the target's states, if the target does not apply it
        """
        self.config = config
        self._dtype = jnp.dtype(dtype)
        self.page_size = paging.page_size
        self.table_pages = table_pages
        self.compilations = Compilations()
        self.constants = program.Constants(config, paging, children, vocab_limit, placement)
        self._steps: dict[StepShape, Any] = {}  # compiled functions
        self._fuse = compiled_fusion(paging.backend)
        self._fusion, self._fusion_params = fusion, fusion_params or {}
        self.feature_dtype = np.dtype(feature_dtype)
        self.params = params
        make = make_pools if placement is None else placement.make_pools
        self.pools = make(config, total_pages, paging.page_size, dtype)
        if paging.backend == "cpu":  # committed to the device like the packed weights; otherwise other programs result
            self.pools = jax.device_put(self.pools, jax.local_devices(backend="cpu")[0])
        self._seconds: dict[StepShape, float] = {}
        self._zeros: dict[StepShape, jax.Array] = {}
        self._step_buffers: dict[StepShape, StepBuffer] = {}

    @property
    def backend(self) -> Backend:
        """The attention kernel."""
        return self.constants.paging.backend

    @property
    def children(self) -> int:
        """Candidates a row."""
        return self.constants.children

    @property
    def feature_width(self) -> int:
        """Width of a row's feature, or of the states that the fusion reads; 0 for models without features."""
        if self._fusion is not None:
            return self._fusion.width
        return self.config.hidden_size if self.config.head.uses_features else 0

    def install(self, params: Params, fusion_params: Params | None = None) -> None:
        """Replace the weights by others of the same shapes and formats; None leaves the fusion's as they are."""
        self.params = params
        if fusion_params is not None:
            self._fusion_params = fusion_params

    @property
    def stacked(self) -> int:
        """Number of stacked layers; 0 for other models."""
        return len(self.config.layers) if self.config.stacked else 0

    def warm_up(self, shapes: list[StepShape], report: Progress = no_progress) -> None:
        """Compile every shape and measure it. report: called before each one."""
        start = time.perf_counter()
        self.move([(0, 0)])
        for done, shape in enumerate(shapes, start=1):
            report(done, len(shapes))
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
        # A smaller step cannot cost more than a larger one: such a measurement was disturbed by other processes.
        for small in self._seconds:
            alike = [s for s in self._seconds if s.tree == small.tree]
            larger = [s for s in alike if s.sessions >= small.sessions and s.rows >= small.rows]
            self._seconds[small] = min(self._seconds[shape] for shape in larger)

    def cost(self, shape: StepShape) -> float:
        """Seconds that a step of a shape takes; before measurements, an estimate without a unit."""
        if shape not in self._seconds:
            return 1 + _DEFAULT_ROW_COST * shape.sessions * shape.rows
        return self._seconds[shape] + _HOST_SECONDS

    def run(self, shape: StepShape, inputs: StepInputs) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """One step. Returns candidates [S, R, K] int32 and their log-scores [S, R, K]; waits for the device."""
        ids, log_scores = self._run(shape, inputs)
        return ids, log_scores.view(np.float32)

    def run_tree(self, shape: StepShape, inputs: StepInputs) -> list[NDArray[Any]]:
        """One step and the tree below it. Returns tokens, parents and log-scores of its nodes, [S, nodes] each; of an
        adaptive tree, also their places in the scratch.

        parents: index among the nodes; -1 is the root
        """
        tokens, parents, *places, log_scores = self._run(shape, inputs)
        return [tokens, parents, log_scores.view(np.float32), *places]

    def _run(self, shape: StepShape, inputs: StepInputs) -> NDArray[np.int32]:
        assert inputs.tokens.shape == shape[:2]
        self.compilations.activity = _name(shape)
        features = self._no_features(shape)
        if inputs.features is not None and inputs.features.given.any():
            features = inputs.features.rows
            if self._fusion is not None:
                features = self._fuse(self._fusion, self._dtype, self._fusion_params, features)
        words = inputs.tokens.base  # all inputs are views of it
        result, self.pools = self._step(shape)(self.params, self.pools, words, features)
        return np.asarray(result)

    def _step(self, shape: StepShape) -> Any:
        if shape not in self._steps:
            self._steps[shape] = program.compiled_step(self.constants, self.layout(shape))
        return self._steps[shape]

    def layout(self, shape: StepShape) -> InputLayout:
        """The layout of the inputs of a shape."""
        chained = self.config.chained
        return InputLayout(shape, self.table_pages, self.feature_width, self.stacked, chained, self.feature_dtype)

    def step_buffer(self, shape: StepShape) -> StepBuffer:
        """The reusable inputs of a shape."""
        if shape not in self._step_buffers:
            self._step_buffers[shape] = StepBuffer(self.layout(shape))
        return self._step_buffers[shape]

    def _no_features(self, shape: StepShape) -> jax.Array:
        """Zeros in place of the target's features, kept on the device, for steps without any."""
        if shape not in self._zeros:
            width = self.config.hidden_size if self.feature_width else 0
            dtype = self.feature_dtype if self._fusion is None else jnp.float32  # as the fusion makes them
            self._zeros[shape] = jnp.zeros((shape.sessions, shape.rows, width), dtype)
        return self._zeros[shape]

    def move(self, moves: list[tuple[int, int]]) -> None:
        """Copy slots, (source, target) each, without a step."""
        for start in range(0, len(moves), _MOVES):
            part = moves[start : start + _MOVES]
            padded = np.zeros((2, _MOVES), dtype=np.int32)
            padded[:, : len(part)] = np.array(part, dtype=np.int32).T
            self.compilations.activity = f"{len(moves)} moves"
            self.pools = program.move(self.constants.placement, self.pools, padded)

    def _trial(self, shape: StepShape, inputs: StepInputs) -> float:
        start = time.perf_counter()
        self._run(shape, inputs)
        return time.perf_counter() - start


def _name(shape: StepShape) -> str:
    step = f"a step of {shape.sessions} x {shape.rows} rows"
    return step if shape.tree is None else f"{step} and the trees below"
