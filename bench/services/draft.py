"""Expansion steps of the draft service's engine against their floor, split into device and host time.

step    an engine step that expands S x Q nodes: S sessions, Q nodes each
device  the compiled program
host    the rest of the step: expand requests, inputs, dispatch, results, trees. The dispatch time is measured with an
        empty program that has the same arguments
floor   the time to read the weights and the sessions' keys and values, at the bandwidth measured in the same run

Weights are random, because speed does not depend on them. Logits are scaled so that trees have realistic shapes.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from bench.harness.flags import positive_int, positive_ints
from bench.harness.report import Report, new_figure
from bench.services.draft_kernels import device_bandwidth
from outrider.config import DraftAttentionBackend
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureBlock, FeatureSpec
from outrider.serving.messages import OpenSession
from outrider.speculation.proposal import UNLIMITED_DRAFT, Commit, extend_hash
from outrider.speculation.sampling import SamplingParams, StopConditions
from services.draft.drafters.feature import FeatureDrafter
from services.draft.drafters.model import ModelDrafter
from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.engine.engine import DraftEngine
from services.draft.kernels.base import Paging
from services.draft.model.layers.backend import choose
from services.draft.model.layers.config import Attention, Layer, Mlp, ModelConfig
from services.draft.model.layers.heads import Eagle3Head, TokenHead
from services.draft.model.layers.pallas_backend import with_cache_for
from services.draft.model.layers.rope import Rope
from services.draft.model.matrices.packed import pack_params
from services.draft.model.params import Params
from services.draft.model.programs.runner import ModelRunner
from services.draft.model.weights.arrays import layer_params, putter
from services.draft.model.weights.tensors import Tensors
from services.draft.sessions.batch import InputLayout, StepInputs, StepShape
from services.draft.sessions.frontier import TreeLimits
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS
from services.target.kernels.cpu.bandwidth import read_bandwidth

PAGE = 16
GROWTH_TOKENS = 256  # tokens committed in a session during the benchmark, at most
LOGIT_SCALE = 8.0
EPSILON = 1e-5
SHAPES = ("1x1", "1x8", "4x4", "16x4")
PERCENTILE = 20  # of step times: other processes slow some steps down
CONFIGS = ("plain/float32", "cpu/float32", "cpu/bfloat16")
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/draft-steps.*."""
    parser = argparse.ArgumentParser(prog="outrider bench draft", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--kinds", nargs="+", type=_config, default=CONFIGS, metavar="KERNELS/FORMAT",
                        help="kernels and number format; plain kernels are measured at one context only")  # fmt: skip
    parser.add_argument("--shapes", nargs="+", type=_shape, default=SHAPES, metavar="SxQ",
                        help="sessions x expanded nodes of each")  # fmt: skip
    parser.add_argument("--contexts", nargs="+", type=positive_int, default=[256, 2048],
                        help="committed tokens per session")  # fmt: skip
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--steps", type=positive_int, default=30, help="timed steps of each figure")
    parser.add_argument("--name", default="draft-steps", help="name of the report")
    args = parser.parse_args(argv)
    platform = jax.default_backend().upper()
    report = Report(args.name, f"The draft service on a {platform}: expansion steps against their floor")
    threads = len(os.sched_getaffinity(0))
    for name in args.models:
        for kind in args.kinds:
            kernels, dtype = cast(tuple[DraftAttentionBackend, str], kind.split("/"))
            sessions = max(int(shape.split("x")[0]) for shape in args.shapes)
            model = BenchModel(MODELS[name](), dtype, kernels, sessions, max(args.contexts) + GROWTH_TOKENS)
            for context, temperature, shape in _cases(args, kernels):
                measure(report, name, model, shape, context, temperature, args.steps, threads)
            del model
    report.notes += [
        "plain: XLA operations; cpu: the compiled kernels",
        f"step: a step of the engine; device: the compiled program; host: the rest; {PERCENTILE}th percentile of each, "
        "because other processes slow some steps down",
        "floor: reading the weights, keys and values of a step at the bandwidth of the device (on a CPU, of all "
        "threads), GB/s",
        "GFLOP/s: of products with weights; large steps are limited by arithmetic, not by memory",
        "heads: EAGLE-3 of the published shape, one layer, with vocabularies of 8,192 (SmolLM2) and 32,000. The floor "
        "excludes the embedding, of which a step reads one row per node",
    ]
    plot(report)
    report.write()


def _config(text: str) -> str:
    """Kernels and number format in the form KERNELS/FORMAT. Raises ArgumentTypeError."""
    kernels, _, dtype = text.partition("/")
    if kernels not in get_args(DraftAttentionBackend) or dtype not in _DTYPES:
        known = f"{', '.join(get_args(DraftAttentionBackend))}, a / and {' or '.join(_DTYPES)}"
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {known}")
    return text


def _shape(text: str) -> str:
    """Sessions and nodes in the form SxQ. Raises ArgumentTypeError."""
    positive_ints(text, "x", 2)
    return text


def _cases(args: argparse.Namespace, kernels: str) -> Iterator[tuple[int, float, StepShape]]:
    for context in args.contexts:
        for temperature in args.temperatures:
            if temperature and context != args.contexts[0]:
                continue  # the cost of sampling does not depend on the context
            if kernels == "plain" and (temperature or context != args.contexts[0]):
                continue  # the plain twin is only a baseline
            for shape in args.shapes:
                sessions, rows = map(int, shape.split("x"))
                yield context, temperature, StepShape(sessions, rows, rows)


# --- models ---


@dataclass(frozen=True)
class Model:
    """A model's configuration. embedding: rows of its embedding; 0 if it is tied to the head."""

    config: ModelConfig
    embedding: int = 0


def _head(hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocab: int) -> Model:
    attention = Attention(2 * hidden, heads, kv_heads, head_dim, Rope(10_000.0))
    layer = Layer(attention, Mlp(inner), EPSILON, beside=True)
    return Model(ModelConfig("EAGLE3", vocab, hidden, (layer,), 8192, Eagle3Head(EPSILON)), 32_000)


def _decoder() -> Model:
    layer = Layer(Attention(576, 9, 3, 64, Rope(100_000.0)), Mlp(1536), EPSILON)
    return Model(ModelConfig("Llama", 49_152, 576, (layer,) * 30, 8192, TokenHead(EPSILON), tied_head=True))


MODELS: dict[str, Callable[[], Model]] = {
    "head of SmolLM2-135M": lambda: _head(576, 9, 3, 64, 1536, 8192),
    "head of Llama-8B": lambda: _head(4096, 32, 8, 128, 14_336, 32_000),
    "SmolLM2-135M": _decoder,
}


class _Random:
    """Random tensors in place of a checkpoint's."""

    def __init__(self) -> None:
        self._numbers = np.random.default_rng(0).standard_normal(1_000_003).astype(np.float32)

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        del name
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return np.resize(self._numbers, shape) * np.float32(shape[-1] ** -0.5)


def params_of(model: Model, dtype: Any) -> Params:
    """Random weights."""
    config, random, put = model.config, _Random(), putter(dtype)
    hidden = config.hidden_size
    layers = [layer_params(cast(Tensors, random), "", layer, hidden, put) for layer in config.layers]
    head = LOGIT_SCALE * random.read("head", (config.vocab_size, hidden)).T
    params: Params = {"norm": put(np.ones(hidden)), "layers": layers, "head": put(head)}
    if model.embedding:
        params["embed"] = put(random.read("embed", (model.embedding, hidden)))
    return params


# --- steps ---


class BenchModel:
    """A model with random weights, and engines for cases that share its weights and pools."""

    def __init__(self, model: Model, dtype: str, kernels: DraftAttentionBackend, sessions: int, tokens: int) -> None:
        config = model.config
        self.dtype = dtype
        self.backend = backend = choose(kernels, jax.devices()[0], config, _DTYPES[dtype], PAGE)
        config = with_cache_for(config, backend)
        params = params_of(model, _DTYPES[dtype])
        if backend == "cpu":
            params = pack_params(params)
        leaves = {id(leaf): leaf for name, part in params.items() if name != "embed" for leaf in jax.tree.leaves(part)}
        self.weight_bytes = int(sum(leaf.nbytes for leaf in leaves.values()))
        self.token_bytes = jnp.dtype(_DTYPES[dtype]).itemsize * sum(
            math.prod(layer.attention.kv_shape) for layer in config.layers
        )
        self.pages = sessions * -(-(tokens + SCRATCH_SLOTS) // PAGE)
        self.runner = TimedRunner(
            config, params, dtype=_DTYPES[dtype], total_pages=self.pages, paging=Paging(PAGE, backend),
            table_pages=-(-tokens // PAGE), children=4, vocab_limit=2**31 - 2, feature_dtype=jnp.bfloat16,
        )  # fmt: skip

    def operations(self, shape: StepShape) -> float:
        """Floating-point operations of a step's products with weights."""
        return 2.0 * shape.sessions * shape.rows * self.weight_bytes / int(jnp.dtype(_DTYPES[self.dtype]).itemsize)

    def engine(self, shape: StepShape) -> DraftEngine:
        """An engine whose steps have one shape."""
        prefix = PrefixCache(PageAllocator(self.pages, PAGE), enabled=False)
        drafter: ModelDrafter
        if self.runner.config.head.uses_features:
            drafter = FeatureDrafter("EAGLE3", self.runner, prefix, shape.sessions, 64, FeatureSpec())
        else:
            drafter = StandaloneDrafter(self.runner, prefix, shape.sessions, 64)
        drafter.set_expansion_shapes([shape])
        self.runner.warm_up([shape])
        return DraftEngine(drafter, TreeLimits(floor=1e-30), shape.sessions)


class TimedRunner(ModelRunner):
    """A runner that records the arguments and the duration of its last run, and what all programs of steps took.

    calls: number of these programs; program_seconds: from their dispatch to their results on the host
    preferred: a shape that is chosen wherever it fits, whatever it costs
    """

    preferred: StepShape | None = None
    calls = 0
    program_seconds = 0.0

    def cost(self, shape: StepShape) -> float:
        return 0.0 if shape == self.preferred else super().cost(shape)

    def _run(self, shape: StepShape, inputs: StepInputs) -> NDArray[np.int32]:
        start = time.perf_counter()
        result = super()._run(shape, inputs)
        self.program_seconds += time.perf_counter() - start
        self.calls += 1
        return result

    def run(self, shape: StepShape, inputs: StepInputs) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        start = time.perf_counter()
        self.shape, self.inputs = shape, inputs
        result = super().run(shape, inputs)
        self.seconds = time.perf_counter() - start
        return result

    def dispatch_seconds(self) -> float:
        """Seconds of an empty program with the arguments of the last run."""
        start = time.perf_counter()
        words, features = self.inputs.tokens.base, self._no_features(self.shape)
        layout = self.layout(self.shape)
        result, self.pools = _empty_program(self.constants, layout, self.params, self.pools, words, features)
        np.asarray(result)
        return time.perf_counter() - start


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3, keep_unused=True)
def _empty_program(constants: Any, layout: InputLayout, params: Any, pools: Any, words: Any, features: Any) -> Any:
    del params, words, features
    return jnp.zeros((2, layout.shape.sessions, layout.shape.heads, constants.children), jnp.int32), pools


def measure(
    report: Report, name: str, model: BenchModel, shape: StepShape, context: int, temperature: float, steps: int,
    threads: int,
) -> None:  # fmt: skip
    """Measure steps that expand as many nodes as the shape has rows; skip those that expand roots."""
    engine, runner = model.engine(shape), model.runner
    driver = SessionDriver(engine, shape.sessions, context, temperature)
    times: list[tuple[float, float]] = []
    before = bandwidth_of(threads)
    while len(times) < steps:
        start = time.perf_counter()
        engine.step()
        taken = time.perf_counter() - start
        if engine.load().step_tokens == shape.sessions * shape.rows and not driver.at_roots:
            times.append((taken, runner.seconds))
        driver.commit_all()
    empty = [runner.dispatch_seconds() for _ in range(steps)]
    bandwidth = (before + bandwidth_of(threads)) / 2
    dispatch = float(np.percentile(empty, PERCENTILE))
    step, device, host = (
        float(np.percentile(values, PERCENTILE))
        for values in zip(*((taken, ran - dispatch, taken - ran + dispatch) for taken, ran in times), strict=True)
    )
    floor = (model.weight_bytes + shape.sessions * context * model.token_bytes) / bandwidth
    report.add(
        model=name, kernels=model.backend, format=model.dtype, temperature=temperature, context=context,
        shape=f"{shape.sessions}x{shape.rows}", **{"step ms": 1e3 * step, "host ms": 1e3 * host},
        **{"device ms": 1e3 * device, "floor ms": 1e3 * floor, "device / floor": device / floor},
        **{"GB/s": bandwidth / 1e9, "GFLOP/s": model.operations(shape) / device / 1e9},
    )  # fmt: skip
    driver.close()


def bandwidth_of(threads: int) -> float:
    """Read bandwidth of the device in bytes/s; on a CPU, of all threads together."""
    return read_bandwidth(threads) if jax.default_backend() == "cpu" else device_bandwidth(4 << 30)


class SessionDriver:
    """Sessions of an engine whose draft tokens are all rejected.

    When all trees are complete, `commit_all` commits a token to each session that is not in its tree.
    """

    def __init__(self, engine: DraftEngine, sessions: int, context: int, temperature: float) -> None:
        self.engine, self.drafter = engine, cast(ModelDrafter, engine.drafter)
        self.at_roots = True  # the next step expands roots
        sampling = SamplingParams(temperature=temperature, seed=1)
        for i in range(sessions):
            tokens = np.random.default_rng(i).integers(300, 20_000, context).astype(np.uint32)
            engine.open(OpenSession(i, tokens, context, sampling, StopConditions(10**6, ignore_eos=True)))
            prefix_kv = self.drafter.prefix_kvs[i]
            prefix_kv.feed(context - prefix_kv.shift - 1)  # skip the prefill
        self._feed()

    def commit_all(self) -> None:
        """Commit a token to each session, if the engine is idle."""
        self.at_roots = self.engine.idle
        if not self.at_roots:
            return
        sessions = list(self.engine.running.values())
        if sessions[0].length - sessions[0].prompt_length >= GROWTH_TOKENS - 8:
            raise RuntimeError("a session has no room for more steps; lower --steps")
        for session in sessions:
            children = {session.tree.token[i] for i in session.tree.root_children}
            token = next(token for token in range(300, 400) if token not in children)
            path = extend_hash(session.tree.root_hash, token)
            tokens = np.array([token], np.uint32)
            self.engine.receive((), [Commit(session.id, session.length, tokens, path, draft_budget=UNLIMITED_DRAFT)])
        self._feed()

    def _feed(self) -> None:
        if self.drafter.features is None:
            return
        width = 2 * self.drafter.runner.feature_width
        for session in list(self.engine.running.values()):
            session.features.skip(self.drafter.prefix_kvs[session.id].settled)
            first, count = session.features.end, session.length - 1 - session.features.end
            row = np.random.default_rng(session.length).standard_normal((count, width // 2)).astype(jnp.bfloat16)
            self.engine.receive_features([FeatureBlock(session.id, first, row.view(np.uint8).reshape(count, width))])

    def close(self) -> None:
        """End all sessions."""
        for i in list(self.engine.running):
            self.engine.close(i)


def plot(report: Report) -> None:
    """Step time over the floor by shape, greedy at the shortest context."""
    context = min(row["context"] for row in report.rows)
    rows = [row for row in report.rows if row["context"] == context and not row["temperature"]]
    rows = [row for row in rows if row["kernels"] != "plain"]
    models = list(dict.fromkeys((row["model"], row["format"]) for row in rows))
    figure = new_figure(7, 3.5)
    axes = figure.subplots()
    for model in models:
        own = [row for row in rows if (row["model"], row["format"]) == model]
        axes.plot([row["shape"] for row in own], [row["step ms"] / row["floor ms"] for row in own], marker="o",
                  label=", ".join(model))  # fmt: skip
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set(xlabel="sessions x expanded nodes", ylabel="step / floor", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    report.save(figure)
