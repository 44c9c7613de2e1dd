"""What --deterministic costs: steps of the target with the flag and without, in turns, on this machine.

moe    a mixture of experts of 0.1 billion random parameters (the shape of Qwen3-MoE), which runs module by module
dense  the default model, which on a CPU runs as a compiled program and has the same bits in any company anyway
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.harness.flags import whole
from bench.harness.report import Report
from bench.services.target import first_token, many, verified_steps
from outrider.checkpoints import checkpoint
from outrider.config import TargetConfig
from services.target.engine.engine import TargetEngine
from services.target.process.app import build_engine

MOE = {
    "vocab_size": 20_000, "hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 10,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}  # fmt: skip
DTYPES = ("bfloat16", "float16", "float32")
ROUNDS = 3
MEASURED: dict[str, Callable[[TargetEngine, int], float]] = {
    "step of 1 row": lambda engine, steps: verified_steps(engine, [1], steps)[0],
    "step of 8 rows": lambda engine, steps: verified_steps(engine, [8], steps)[0],
    "8 sessions, plain": lambda engine, steps: many(engine, 8, steps),
    "prompt of 48 tokens": lambda engine, steps: min(first_token(engine, seed) for seed in range(max(2, steps // 8))),
}


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/deterministic.*."""
    parser = argparse.ArgumentParser(prog="outrider bench deterministic", description=__doc__)
    parser.add_argument("--steps", type=whole, default=40, help="timed steps of each figure")
    parser.add_argument("--models", nargs="+", choices=["moe", "dense"], default=["moe", "dense"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    args = parser.parse_args(argv)
    report = Report("deterministic", "What --deterministic costs on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            path = checkpoint.resolve("default") if model == "dense" else write_moe(Path(folder))
            for dtype in args.dtypes:
                compare(report, model, path, dtype, args.steps)
    report.notes += [
        f"milliseconds of a whole step, the best of {ROUNDS} medians of {args.steps} steps, with and without in turns",
        "cost: with / without",
    ]
    report.write()


def write_moe(folder: Path) -> Path:
    """A random mixture of experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3_moe", **MOE)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def compare(report: Report, model: str, folder: Path, dtype: str, steps: int) -> None:
    """All figures of a model in a number format."""
    engines = {
        flag: build_engine(
            folder,
            TargetConfig(
                device="cpu",
                dtype=dtype,
                deterministic=flag,
                disable_radix_cache=True,
                max_total_tokens=16 * 1024,
                self_speculation="off",
            ),
        )
        for flag in (False, True)
    }
    for what, measure in MEASURED.items():
        times = np.array([[measure(engines[flag], steps) for flag in (False, True)] for _ in range(ROUNDS)])
        without, with_flag = 1e3 * times.min(axis=0)
        report.add(
            model=model, format=dtype, what=what, without=without, cost=with_flag / without, **{"with": with_flag}
        )
