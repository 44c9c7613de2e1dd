"""Explicit draft trees of a feature-based head: one fused program against one program per level.

fused      one program for the whole tree; the host reads the selected nodes
per level  a program per level; the host reads all candidates of each
floor      the time to read the weights once per level

Both use the same random weights, run alternately in one process, from the target's features to the proposal, and
propose equal trees.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

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
from services.draft.drafters.feature import FeatureDrafter
from services.draft.drafters.model import ModelDrafter
from services.draft.engine.engine import DraftEngine
from services.draft.sessions.frontier import TreeLimits

CONTEXT = 256
TOPK = 4  # of all trees: the children per node of the benchmarked models
TREES = ("2/4/6", "3/4/8", "3/4/12", "5/4/16")


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/draft-trees.*."""
    parser = argparse.ArgumentParser(prog="outrider bench trees", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=[m for m in MODELS if "head" in m], default=["head of SmolLM2-135M"]
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--trees", nargs="+", type=_tree, default=TREES, help=f"STEPS/TOPK/TOKENS; TOPK is {TOPK}")
    parser.add_argument("--sessions", nargs="+", type=positive_int, default=[1, 4], help="concurrent sessions")
    parser.add_argument("--steps", type=positive_int, default=40, help="timed trees of each figure")
    args = parser.parse_args(argv)
    report = Report("draft-trees", "Explicit draft trees of a head: one fused program against one program per level")
    threads = len(os.sched_getaffinity(0))
    kernels: DraftAttentionBackend = "cpu" if jax.default_backend() == "cpu" else "auto"
    for name in args.models:
        model = BenchModel(MODELS[name](), args.dtype, kernels, max(args.sessions), CONTEXT + GROWTH_TOKENS)
        for tree in args.trees:
            shape = TreeShape(*map(int, tree.split("/")))
            for sessions in args.sessions:
                fused, per_level = measure(model, shape, sessions, args.steps)
                floor = shape.steps * model.weight_bytes / bandwidth_of(threads)
                report.add(
                    model=name, format=args.dtype, tree=tree, sessions=sessions, **{"fused ms": 1e3 * fused},
                    **{"per level ms": 1e3 * per_level, "speedup": per_level / fused},
                    **{"floor ms": 1e3 * floor, "fused / floor": fused / floor},
                )  # fmt: skip
    report.notes += [
        "tree: steps, children per node, tokens; one tree per session. Times from the features of a commit to the "
        f"proposals, {PERCENTILE}th percentile, at {CONTEXT} committed tokens per session and more",
        "fused: one program for all levels; per level: a program per level; speedup: of fused over per level; floor: "
        "reading the weights once per level",
    ]
    report.write()


def _tree(text: str) -> str:
    """A tree in the form STEPS/TOPK/TOKENS. Raises ArgumentTypeError."""
    if positive_ints(text, "/", 3)[1] != TOPK:
        raise argparse.ArgumentTypeError(f"{text}: topk must be {TOPK}")
    return text


def measure(model: BenchModel, shape: TreeShape, sessions: int, steps: int) -> tuple[float, float]:
    """Seconds of one tree in each session: with one fused program, and with one program per level."""
    drivers = [
        SessionDriver(engine_of(model, shape, sessions, fused=fused), sessions, CONTEXT, 0.0) for fused in (True, False)
    ]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps):
        for driver, taken in zip(drivers, times, strict=True):
            start = time.perf_counter()
            while not driver.engine.idle:
                driver.engine.step()
            taken.append(time.perf_counter() - start)
            driver.commit_all()
    for driver in drivers:
        driver.close()
    fused, per_level = (float(np.percentile(taken[1:], PERCENTILE)) for taken in times)
    return fused, per_level


def engine_of(model: BenchModel, shape: TreeShape, sessions: int, *, fused: bool) -> DraftEngine:
    """An engine for trees of a shape. fused: with one program per tree."""
    prefix = PrefixCache(PageAllocator(model.pages, PAGE), enabled=False)
    drafter = FeatureDrafter("EAGLE3", model.runner, prefix, sessions, 64, FeatureSpec())
    set_tree_shape = FeatureDrafter.set_tree_shape if fused else ModelDrafter.set_tree_shape
    set_tree_shape(drafter, shape)
    model.runner.warm_up(drafter.shapes)
    limits = TreeLimits(max(256, shape.candidates), shape.steps, shape.topk, floor=0.0, shape=shape)
    return DraftEngine(drafter, limits, sessions)
