"""Cost of --deterministic: steps of the target with and without the flag, measured alternately on a CPU.

moe    a mixture of experts of 0.1 billion random parameters (the shape of Qwen3-MoE), which runs module by module
dense  the default model, which runs as a compiled program; on a CPU it is batch invariant without the flag, too
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from bench.harness.flags import positive_int
from bench.harness.report import Report
from bench.services.target import batch_step, first_token, verification_steps
from outrider.checkpoints import checkpoint
from outrider.config import DType, TargetConfig
from services.target.engine.engine import TargetEngine
from services.target.process.app import build_engine

MOE = {
    "vocab_size": 20_000, "hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 10,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}  # fmt: skip
DTYPES = ("bfloat16", "float16", "float32")
ROUNDS = 3
THREADS = torch.get_num_threads()  # loading a compiled program sets PyTorch's threads to 1
MEASURED: dict[str, Callable[[TargetEngine, int], float]] = {
    "step of 1 token": lambda engine, steps: verification_steps(engine, [1], steps)[0],
    "step of 8 tokens": lambda engine, steps: verification_steps(engine, [8], steps)[0],
    "8 sessions, plain": lambda engine, steps: batch_step(engine, 8, steps),
    "prompt of 48 tokens": lambda engine, steps: min(first_token(engine, seed) for seed in range(max(2, steps // 8))),
}


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/deterministic.*."""
    parser = argparse.ArgumentParser(prog="outrider bench deterministic", description=__doc__)
    parser.add_argument("--steps", type=positive_int, default=40, help="timed steps of each figure")
    parser.add_argument("--models", nargs="+", choices=["moe", "dense"], default=["moe", "dense"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    args = parser.parse_args(argv)
    report = Report("deterministic", "Cost of --deterministic on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            path = checkpoint.resolve("default") if model == "dense" else write_moe(Path(folder))
            for dtype in args.dtypes:
                compare(report, model, path, dtype, args.steps)
    report.notes += [
        f"without, with: ms of a whole step without and with the flag, measured alternately; best of {ROUNDS} medians "
        f"of {args.steps} steps",
        "cost: with / without",
    ]
    report.write()


def write_moe(folder: Path) -> Path:
    """Write a random mixture of experts. Returns its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3_moe", **MOE)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder


def compare(report: Report, model: str, folder: Path, dtype: str, steps: int) -> None:
    """Add the figures of a model in a number format."""
    engines = {}
    for flag in (False, True):
        torch.set_num_threads(THREADS)
        config = TargetConfig(
            device="cpu", dtype=cast(DType, dtype), deterministic=flag, disable_radix_cache=True,
            max_total_tokens=16 * 1024, self_speculation="off",
        )  # fmt: skip
        engines[flag] = build_engine(folder, config)
    for what, measure in MEASURED.items():
        times = np.array([[measure(engines[flag], steps) for flag in (False, True)] for _ in range(ROUNDS)])
        without, with_flag = 1e3 * times.min(axis=0)
        report.add(
            model=model, format=dtype, what=what, without=without, cost=with_flag / without, **{"with": with_flag}
        )
