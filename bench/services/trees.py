"""Explicit trees of a head: one program for each against a round a level, from the target's features to the proposal.

whole    one program, of which the host sees the chosen nodes
rounds   a program a level, of which the host sees all candidates
floor    the time in which the weights can be read once a level

Both take turns, with the same random weights and in one process, and propose the same trees.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

import jax
import numpy as np

from bench.harness.flags import whole, wholes
from bench.harness.report import Report
from bench.services.draft import MODELS, PAGE, QUICK, ROOM, Drive, Subject, bandwidth_of
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureSpec
from outrider.speculation.shape import TreeShape
from services.draft.drafters.feature import FeatureDrafter
from services.draft.drafters.model import ModelDrafter
from services.draft.engine.engine import DraftEngine
from services.draft.sessions.frontier import TreeLimits

CONTEXT = 256
TOPK = 4  # of all trees, as many children as the subjects give
TREES = ("2/4/6", "3/4/8", "3/4/12", "5/4/16")


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/draft-trees.*."""
    parser = argparse.ArgumentParser(prog="outrider bench trees", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=[m for m in MODELS if "head" in m], default=["head of SmolLM2-135M"]
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--trees", nargs="+", type=_tree, default=TREES, help=f"steps/topk/rows; topk is {TOPK}")
    parser.add_argument("--sessions", nargs="+", type=whole, default=[1, 4])
    parser.add_argument("--steps", type=whole, default=40, help="timed trees of each figure")
    args = parser.parse_args(argv)
    report = Report("draft-trees", "Explicit trees of a head: one program against a round a level")
    threads = len(os.sched_getaffinity(0))
    for name in args.models:
        kernels = "cpu" if jax.default_backend() == "cpu" else "auto"
        subject = Subject(MODELS[name](), args.dtype, kernels, max(args.sessions), CONTEXT + ROOM)
        for tree in args.trees:
            shape = TreeShape(*map(int, tree.split("/")))
            for sessions in args.sessions:
                program, rounds = race(subject, shape, sessions, args.steps)
                floor = shape.steps * subject.weight_bytes / bandwidth_of(threads)
                report.add(
                    model=name, format=args.dtype, tree=tree, sessions=sessions, **{"whole ms": 1e3 * program},
                    **{"rounds ms": 1e3 * rounds, "rounds / whole": rounds / program},
                    **{"floor ms": 1e3 * floor, "whole / floor": program / floor},
                )  # fmt: skip
    report.notes += [
        "tree: steps, children, rows; of every session one. Times from the features of a commit to the proposals, the "
        f"{QUICK}th percentile, {CONTEXT} committed tokens a session and more",
        "whole: one program for all levels; rounds: a program a level; floor: the weights read once a level",
    ]
    report.write()


def _tree(text: str) -> str:
    """The same, if it is a tree that can be measured."""
    if wholes(text, "/", 3)[1] != TOPK:
        raise argparse.ArgumentTypeError(f"{text}: topk must be {TOPK}")
    return text


def race(subject: Subject, shape: TreeShape, sessions: int, steps: int) -> tuple[float, float]:
    """Seconds of a tree for each of some sessions, in one program and in rounds."""
    drives = [
        Drive(engine_of(subject, shape, sessions, whole=whole), sessions, CONTEXT, 0.0) for whole in (True, False)
    ]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps):
        for drive, taken in zip(drives, times, strict=True):
            start = time.perf_counter()
            while not drive.engine.idle:
                drive.engine.step()
            taken.append(time.perf_counter() - start)
            drive.go_on()
    for drive in drives:
        drive.close()
    whole, rounds = (float(np.percentile(taken[1:], QUICK)) for taken in times)
    return whole, rounds


def engine_of(subject: Subject, shape: TreeShape, sessions: int, *, whole: bool) -> DraftEngine:
    """An engine for trees of a shape. whole: each may be one program."""
    prefix = PrefixCache(PageAllocator(subject.pages, PAGE), enabled=False)
    drafter = FeatureDrafter("EAGLE3", subject.runner, prefix, sessions, 64, FeatureSpec())
    follow = FeatureDrafter.follow if whole else ModelDrafter.follow
    follow(drafter, shape)
    subject.runner.warm_up(drafter.shapes)
    limits = TreeLimits(max(256, shape.candidates), shape.steps, shape.topk, floor=0.0, shape=shape)
    return DraftEngine(drafter, limits, sessions)
