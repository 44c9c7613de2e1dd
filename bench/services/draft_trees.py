"""Draft trees of a feature-based head: several levels in one program against one program per level.

fused      one program; the host reads the nodes of all levels
per level  a program per level; the host reads the candidates of each, and chooses the nodes of the next one
floor      the time to read the weights once per level

Explicit trees are complete, and equal on both sides. Of adaptive trees both sides expand the root and then as many
nodes as the program does that serves as many sessions on accelerators; they grow on from there, which is not measured.

Both use the same random weights, and run alternately in one process, from the target's features to the proposal.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from bench.harness.flags import positive_int, positive_ints
from bench.harness.report import Report
from bench.services.draft import GROWTH_TOKENS, MODELS, PAGE, PERCENTILE, BenchModel, SessionDriver, bandwidth_of
from outrider.config import DraftAttentionBackend
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureSpec
from outrider.speculation.shape import TreeShape
from services.draft.drafters.feature import GROWTHS, FeatureDrafter
from services.draft.engine.engine import DraftEngine
from services.draft.sessions.batch import Growth, StepShape
from services.draft.sessions.frontier import TreeLimits

CONTEXT = 256
TOPK = 4  # of all trees: the children per node of the benchmarked models
ADAPTIVE = "adaptive"
TREES = ("2/4/6", "3/4/8", "3/4/12", "5/4/16", ADAPTIVE)


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/draft-trees.*."""
    parser = argparse.ArgumentParser(prog="outrider bench trees", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=[m for m in MODELS if "head" in m], default=["head of SmolLM2-135M"]
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--trees", nargs="+", type=_tree, default=TREES,
                        help=f"STEPS/TOPK/TOKENS, TOPK is {TOPK}; or {ADAPTIVE}")  # fmt: skip
    parser.add_argument("--sessions", nargs="+", type=positive_int, default=[1, 4, 16], help="concurrent sessions")
    parser.add_argument("--steps", type=positive_int, default=40, help="timed trees of each figure")
    parser.add_argument("--name", default="draft-trees", help="name of the report")
    args = parser.parse_args(argv)
    report = Report(args.name, "Draft trees of a head: several levels in one program against one program per level")
    threads = len(os.sched_getaffinity(0))
    kernels: DraftAttentionBackend = "cpu" if jax.default_backend() == "cpu" else "auto"
    for name in args.models:
        model = BenchModel(MODELS[name](), args.dtype, kernels, max(args.sessions), CONTEXT + GROWTH_TOKENS)
        for tree in args.trees:
            for sessions in args.sessions:
                shape = shape_of(tree, sessions)
                fused, per_level = measure(model, shape, sessions, args.steps)
                floor = shape.steps * model.weight_bytes / bandwidth_of(threads)
                report.add(
                    model=name, format=args.dtype, tree=tree, sessions=sessions, **{"fused ms": 1e3 * fused.seconds},
                    **{"per level ms": 1e3 * per_level.seconds, "speedup": per_level.seconds / fused.seconds},
                    **{"fused programs": fused.calls, "per level programs": per_level.calls},
                    **{"fused host ms": 1e3 * fused.host, "per level host ms": 1e3 * per_level.host},
                    **{"floor ms": 1e3 * floor, "fused / floor": fused.seconds / floor},
                )  # fmt: skip
    report.notes += [
        "tree: steps, children per node, tokens; adaptive: rounds of the program after the root, and nodes that each "
        f"expands in a session: {', '.join(map(_rounds, GROWTHS))}. One tree per session. Times from the features of a "
        f"commit to the proposals, {PERCENTILE}th percentile, at {CONTEXT} committed tokens per session and more",
        "fused: one program for several levels; per level: a program per level; speedup: of fused over per level; "
        "programs: for the trees of all sessions; host: the time outside of them; floor: reading the weights once per "
        "level",
    ]
    report.write()


def _rounds(shape: StepShape) -> str:
    assert isinstance(shape.tree, Growth)
    return f"{shape.tree.rounds} x {shape.tree.width} for {shape.sessions}"


def _tree(text: str) -> str:
    """A tree in the form STEPS/TOPK/TOKENS, or the word for adaptive ones. Raises ArgumentTypeError."""
    if text != ADAPTIVE and positive_ints(text, "/", 3)[1] != TOPK:
        raise argparse.ArgumentTypeError(f"{text}: topk must be {TOPK}")
    return text


def shape_of(tree: str, sessions: int) -> TreeShape | Growth:
    """The shape of an explicit tree, or what one program grows of adaptive ones."""
    if tree != ADAPTIVE:
        return TreeShape(*map(int, tree.split("/")))
    shape = next((shape for shape in GROWTHS if shape.sessions >= sessions), GROWTHS[-1])
    assert isinstance(shape.tree, Growth)
    return shape.tree


class Cost(NamedTuple):
    """What the trees of all sessions cost. calls: number of programs; host: seconds outside of them."""

    seconds: float
    calls: float
    host: float


def measure(model: BenchModel, shape: TreeShape | Growth, sessions: int, steps: int) -> tuple[Cost, Cost]:
    """One tree in each session: with one program for several levels, and with one program per level."""
    drivers = [
        SessionDriver(engine_of(model, shape, sessions, fused=fused), sessions, CONTEXT, 0.0) for fused in (True, False)
    ]
    costs: tuple[list[Cost], list[Cost]] = ([], [])
    runner = model.runner
    for _ in range(steps):
        for driver, own in zip(drivers, costs, strict=True):
            calls, inside, start = runner.calls, runner.program_seconds, time.perf_counter()
            while not _grown(driver, shape):
                driver.engine.step()
            seconds = time.perf_counter() - start
            own.append(Cost(seconds, runner.calls - calls, seconds - (runner.program_seconds - inside)))
            while not driver.engine.idle:
                driver.engine.step()
            driver.commit_all()
    for driver in drivers:
        driver.close()
    fused, per_level = (Cost(*np.percentile(own[1:], PERCENTILE, axis=0).tolist()) for own in costs)
    return fused, per_level


def _grown(driver: SessionDriver, shape: TreeShape | Growth) -> bool:
    """True if all trees have the levels that are measured, or cannot grow."""
    engine = driver.engine
    if isinstance(shape, TreeShape):
        return engine.idle
    return all(
        len(session.frontiers[-1].expanded) >= shape.expansions or not session.growing
        for session in engine.running.values()
    )


def engine_of(model: BenchModel, shape: TreeShape | Growth, sessions: int, *, fused: bool) -> DraftEngine:
    """An engine for trees of a shape. fused: with one program for several levels."""
    prefix = PrefixCache(PageAllocator(model.pages, PAGE), enabled=False)
    drafter = FeatureDrafter("EAGLE3", model.runner, prefix, sessions, 64, FeatureSpec())
    if isinstance(shape, TreeShape):
        drafter.tree_sessions = (sessions,)
        drafter.set_tree_shape(shape)
        limits = TreeLimits(max(256, shape.candidates), shape.steps, shape.topk, floor=0.0, shape=shape)
    else:
        drafter.set_expansion_shapes([StepShape(size, shape.width, shape.width) for size in sorted({1, sessions})])
        model.runner.preferred = StepShape(sessions, 8, 1, shape)  # on CPUs the choice would differ
        drafter.set_growth([model.runner.preferred])
        limits = TreeLimits(floor=1e-30)
    if not fused:
        drafter.grow_by_levels()
    model.runner.warm_up(drafter.shapes)
    return DraftEngine(drafter, limits, sessions)
