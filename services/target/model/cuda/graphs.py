"""Steps as CUDA graphs: captured once for some numbers of rows, replayed with other inputs at the same addresses.

A step is padded to the next captured size with rows that belong to no session: they write NULL_PAGE, see no session's
keys, and their results are not read. Padding does not depend on the device: captured or called directly, a step has the
same inputs at the same addresses, so it is tested without a GPU at every size.

Plain steps are captured during the warm-up. Steps that return hidden states are captured once it is known which states
a draft wants (`expect`): one at a time (`capture_next`), when the engine has time for it. Until then they run directly,
because a capture takes longer than many steps.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.placement.step_sizes import captured_rows
from services.target.kernels.dispatch import Attention, Planner
from services.target.kernels.grouped import GroupedAttention
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Outputs, Runner
from services.target.model.modules import ModuleRunner
from services.target.model.parallel.exchange import all_agree
from services.target.model.parallel.split import is_split
from services.target.model.weight_slots import WeightSlots
from services.target.step.batch import Batch, Capture, TokenArrays, consecutive, pad
from services.target.step.layout import SHORT, Extent, Layout
from services.target.step.upload import DeviceArrays, upload

if TYPE_CHECKING:  # Triton may be missing
    from services.target.kernels.cuda.attention import StaticAttention

log = logging.getLogger(__name__)

_MOST_PAGES = 1 << 18
_NO_STATES: tuple[tuple[int, ...], bool] = ((), False)  # of plain steps
_MOST_STATES = 2  # kinds of hidden states whose steps are kept; one draft needs one

Replay = Callable[[], Outputs]
# Captures the device work of a function; the result replays it.
Capturer = Callable[[Callable[[], Outputs]], Replay]


def direct(run: Callable[[], Outputs]) -> Replay:
    """The capturer for devices without graphs: calls the function every time."""
    return run


class CudaCapturer:
    """Captures CUDA graphs that share memory, because only one runs at a time."""

    def __init__(self, mode: str = "global") -> None:
        """mode: of the capture; thread_local where other threads use the device meanwhile."""
        self._pool = torch.cuda.graph_pool_handle()
        self._mode = mode

    def __call__(self, run: Callable[[], Outputs]) -> Replay:
        """Capture. Calls `run` three times, the first two for lazy initialisation."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=self._mode):
            outputs = run()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


class RankCapturer:
    """Captures on all ranks, or raises RuntimeError on all: their collectives must go on matching."""

    def __init__(self, capturer: Capturer) -> None:
        self.capturer = capturer

    def __call__(self, run: Callable[[], Outputs]) -> Replay:
        """As the capturer of one rank."""
        replay, reason = None, "another rank cannot capture them"
        try:
            replay = self.capturer(run)
        except RuntimeError as error:
            reason = str(error)
        if not all_agree(replay is not None) or replay is None:
            raise RuntimeError(reason)
        return replay


class _Step:
    """A step of a fixed number of rows, with its inputs at fixed addresses."""

    def __init__(
        self, runner: ModuleRunner, batch: Batch, cache: KVCache, capturer: Capturer, *, extent: Extent
    ) -> None:
        """batch: all padding, with the capture of every batch of this step. extent: see `_Key`."""
        self._runner, self._cache, self._extent = runner, cache, extent
        self.size = len(batch)
        self._attention = self._static_attention(batch)
        limits = batch.inputs
        self._slab = DeviceArrays([*limits, *(self._attention.limits if self._attention else ())], batch.device)
        self._placed = self._slab.tensors[:4]
        if self._attention:
            self._attention.attach(self._slab.tensors[4:], self._placed[1])
        self._batch = batch
        filled = self._fill(batch)
        assert filled, "padding takes few pages"
        self._replay = capturer(self._run)

    def forward(self, batch: Batch) -> Outputs | None:
        """As `Runner.forward`; None for a batch that does not fit. The result lasts until the next step."""
        if not self._fill(pad(batch, self.size)):
            return None
        outputs = self._replay()
        features = outputs.features
        if batch.capture is not None:
            assert features is not None, "captured steps return what a batch captures"
            if batch.capture.rows is not None:
                features = _copied(features, batch.capture.rows)
        return Outputs(outputs.logits[: len(batch.rows.sampled)], features)

    def _fill(self, batch: Batch) -> bool:
        arrays: list[NDArray[np.integer]] = [*batch.inputs]
        if self._attention:
            tables = self._attention.arrays(batch)
            if tables is None:
                return False
            arrays += tables
        self._slab.fill(arrays)
        if batch.roots is not None:
            batch.roots.put(self._placed[0])
        if batch.prepared is not None:
            batch.prepared.put(*self._placed[:3])
            if self._attention:
                self._attention.follow(batch.prepared)
        self._batch = replace(batch, placed=self._placed, capture=self._batch.capture)
        return True

    def _run(self) -> Outputs:
        attention = self._attention
        planner: Planner = (lambda _: attention) if attention else self._runner.planner
        return self._runner.run(self._batch, self._cache, planner)

    def _static_attention(self, batch: Batch) -> StaticAttention | None:
        """Attention with tables at fixed addresses, if the runner's attention has any; a trial run finds the kinds."""
        made: list[Attention] = []

        def recording(batch: Batch) -> Attention:
            attention: Any = self._runner.planner(batch)
            if hasattr(attention, "extent"):
                attention.extent = self._extent
            made.append(attention)
            return made[-1]

        self._runner.run(batch, self._cache, recording)
        kinds = getattr(made[0], "kinds", None)
        if kinds is None:
            return None
        from services.target.kernels.cuda.attention import StaticAttention

        pages = min(2 * self._cache.pages, _MOST_PAGES) + -(-self.size // self._cache.page_size)  # and padding's
        ordered = getattr(made[0], "ordered", False)
        return StaticAttention(self.size, pages, kinds, batch.device, ordered=ordered, extent=self._extent)


def _copied(features: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """A copy of some rows, because the next replay overwrites them, and features may be fused later."""
    if (run := consecutive(rows)) is not None:  # as in most steps: no indices must be uploaded
        return features[run].clone()
    return features.index_select(0, upload([rows], features.device)[0])


class _Key(NamedTuple):
    """The properties that distinguish captured steps. extent: of their batches, to which attention is fitted.

    layers, final: of the hidden states that they return, as of Capture
    """

    size: int
    layers: tuple[int, ...]
    final: bool
    extent: Extent

    @property
    def states(self) -> tuple[tuple[int, ...], bool]:
        """The hidden states that they return: layers, and final."""
        return self.layers, self.final

    @property
    def capture(self) -> Capture | None:
        """The states of all rows; None for plain steps."""
        return None if self.states == _NO_STATES else Capture(self.layers, self.final, None)


class GraphRunner:
    """A `Runner` that replays captured steps and runs all other batches directly.

    runner: of those. sizes: rows of the steps to capture, ascending; steps: those that are captured
    works: False once a capture has failed, after which none is tried
    """

    def __init__(self, runner: ModuleRunner, sizes: Sequence[int], capturer: Capturer, *, padding: bool = True) -> None:
        """sizes: rows of the steps to capture. padding: pad smaller steps to these sizes."""
        self.runner = runner
        self.sizes = sorted(set(sizes))
        self.capturer = capturer
        self._padding = padding
        self.steps: dict[_Key, _Step] = {}
        self._due: list[_Key] = []  # steps to capture, the next one first
        self._expected: list[tuple[tuple[int, ...], bool]] = []  # hidden states, layers and final, of captured steps
        self.works = True
        self._cache: KVCache | None = None
        self._device = torch.device("cpu")

    def capture(self, cache: KVCache, device: torch.device) -> None:
        """Capture plain steps of every size over a cache, the largest first, so that the others fit into its memory."""
        self._cache, self._device = cache, device
        self._due = self._keys(*_NO_STATES) + self._due
        while self.due and self._due[0].states == _NO_STATES:
            self.capture_next()
        if self.works:
            log.info("captured steps of %s rows", ", ".join(map(str, self.sizes)))

    def expect(self, capture: Capture) -> None:
        """As `CapturesSteps.expect`. States that were expected long ago give way to new ones, as their draft did."""
        states = capture.layers, capture.final
        if states in self._expected:
            return
        self._expected.append(states)
        for old in self._expected[:-_MOST_STATES]:
            self._expected.remove(old)
            self._due = [key for key in self._due if key.states != old]
            self.steps = {key: step for key, step in self.steps.items() if key.states != old}
        self._due += self._keys(*states)

    @property
    def due(self) -> int:
        """As `CapturesSteps.due`."""
        return len(self._due) if self.works and self._cache is not None else 0

    @torch.inference_mode()
    def capture_next(self) -> None:
        """As `CapturesSteps.capture_next`."""
        assert self._cache is not None, "steps are due once there is a cache"
        key = self._due.pop(0)
        nothing = np.zeros(0, np.int64)
        layout = Layout.of([], [], [], nothing.astype(np.int32), nothing.astype(np.int32), self._cache.page_size)
        rows = TokenArrays(nothing, nothing, nothing)
        batch = pad(Batch(layout, rows, self._device, sample_count=0, capture=key.capture), key.size)
        try:
            self.steps[key] = _Step(self.runner, batch, self._cache, self.capturer, extent=key.extent)
        except RuntimeError as error:  # some operation of the model cannot be captured
            self._give_up(key, str(error).splitlines()[0])
        if key.states != _NO_STATES and not self._due:
            log.info("captured steps with hidden states, of %s rows", ", ".join(map(str, self.sizes)))

    def _give_up(self, key: _Key, reason: str) -> None:
        """Further steps with these states are not captured; where plain steps cannot be, none is."""
        if key.states == _NO_STATES:
            self.works = False
            self.steps.clear()
            log.warning("steps are not captured as CUDA graphs: %s", reason)
        else:
            self._due = [other for other in self._due if other.states != key.states]
            log.warning("some steps with hidden states are not captured as CUDA graphs: %s", reason)

    def forward(self, batch: Batch, cache: KVCache) -> Outputs:
        """As `Runner.forward`. Logits and features last until the next call."""
        size = self.size_for(max(len(batch), len(batch.rows.sampled)))
        if size is not None and self.works and cache is self._cache:
            step = self._step(size, batch)
            outputs = step.forward(batch) if step else None
            if outputs is not None:
                return outputs
        return self.runner.forward(batch, cache)

    def _step(self, size: int, batch: Batch) -> _Step | None:
        """The captured step for a batch. If it is not captured yet, it is the next one to be."""
        extent = batch.layout.extent if self._knows_extents else Extent.LONG
        capture = batch.capture
        key = _Key(size, *((capture.layers, capture.final) if capture else _NO_STATES), extent)
        if key in self._due:
            self._due.insert(0, self._due.pop(self._due.index(key)))
        return self.steps.get(key)

    def size_for(self, rows: int) -> int | None:
        """The size of the step for a number of rows; None if there is none."""
        at = bisect_left(self.sizes, rows)
        if at == len(self.sizes) or (self.sizes[at] != rows and not self._padding):
            return None
        return self.sizes[at]

    def slots(self) -> WeightSlots:
        """As `ModuleRunner.slots`."""
        return self.runner.slots()

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """As `Runner.weights`."""
        return self.runner.weights()

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """As `Runner.update`; parameters keep their addresses, so captured steps read the new values."""
        self.runner.update(tensors)

    @property
    def planner(self) -> Planner:
        """The planner of batches that are not captured; those that are have its kernels."""
        return self.runner.planner

    @property
    def _knows_extents(self) -> bool:
        return bool(getattr(self.planner, "knows_extents", False))

    def _extents(self, size: int) -> Sequence[Extent]:
        """The extents of batches with up to `size` rows, to which attention is fitted."""
        if not self._knows_extents:
            return [Extent.LONG]
        return [extent for extent, rows in ((Extent.LONG, SHORT), (Extent.SHORT, 1), (Extent.PLAIN, 0)) if size > rows]

    def _keys(self, layers: tuple[int, ...], final: bool) -> list[_Key]:
        """The steps that return some states, the largest first."""
        return [_Key(size, layers, final, extent) for size in reversed(self.sizes) for extent in self._extents(size)]


def wrap(runner: ModuleRunner, config: TargetConfig, device: torch.device) -> Runner:
    """The runner with CUDA graphs, if flags and device allow them. Raises ConfigError for inconsistent flags."""
    _check(config)
    captured = device.type == "cuda" and not config.disable_cuda_graph and runner.planner is not GroupedAttention
    rows, padding = captured_rows(config), not config.disable_cuda_graph_padding
    if config.enable_torch_compile and not runner.compilable:
        log.info("--enable-torch-compile has nothing to compile: the model runs with fused kernels")
    elif config.enable_torch_compile:
        from services.target.model.cuda.compiled import compiled

        most = config.torch_compile_max_bs * (config.fixed_tokens_per_session or 1)
        runner = compiled(runner, most)
        if not captured:  # compiled programs need fixed sizes, too
            return GraphRunner(runner, [count for count in rows if count <= most], direct, padding=padding)
    if not captured:
        return runner
    capturer: Capturer = CudaCapturer()
    if is_split(runner.module):  # NCCL's own thread watches earlier collectives, also while a graph is captured
        capturer = RankCapturer(CudaCapturer("thread_local"))
    return GraphRunner(runner, rows, capturer, padding=padding)


def _check(config: TargetConfig) -> None:
    """Raise ConfigError for flags of captured steps that do not fit together."""
    asked = {
        "--cuda-graph-bs": config.cuda_graph_bs,
        "--cuda-graph-max-bs": config.cuda_graph_max_bs,
    }
    for flag, value in asked.items():
        if value is None:
            continue
        if min(value if isinstance(value, tuple) else (value,), default=0) < 1:
            raise ConfigError(f"{flag} must be 1 or more, not {value}")
        if config.disable_cuda_graph:
            raise ConfigError(f"{flag} and --disable-cuda-graph exclude one another; leave one out")
        if config.attention_backend == "torch_native":
            log.warning("%s has no effect: --attention-backend torch_native cannot be captured", flag)
    if config.torch_compile_max_bs < 1:
        raise ConfigError(f"--torch-compile-max-bs must be 1 or more, not {config.torch_compile_max_bs}")
