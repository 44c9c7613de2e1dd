"""Reinforcement learning with rollouts by Outrider: reward, accept length and wall time by step.

The loop is that of docs/examples/rollouts.py: GRPO in PyTorch, weights pushed by tensors after every step. It runs
twice, on systems whose drafts do and do not learn from the rollouts (`--online`); both drafts follow the weights that
they share with the target. Answers to the prompts of a file are to be in capital letters, so that the policy moves away
from its draft.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import httpx

from bench.end_to_end.online import learning_counters
from bench.harness.errors import BenchError
from bench.harness.flags import load_prompts, positive_int
from bench.harness.report import Report, new_figure
from bench.serve.outrider_system import ADMIN_HEADERS, served
from outrider.checkpoints.checkpoint import resolve
from outrider.drafts import DEFAULT_HEAD

_EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "rollouts.py"

_FLAGS = f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {DEFAULT_HEAD} --speculative-always"


def example() -> ModuleType:
    """The example, as a module. Raises BenchError outside of a checkout."""
    if not _EXAMPLE.is_file():
        raise BenchError(f"there is no {_EXAMPLE}; run this benchmark in a checkout of the project")
    spec = importlib.util.spec_from_file_location("rollouts", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rollouts"] = module
    spec.loader.exec_module(module)
    return module


class Run(NamedTuple):
    """The steps of a run on one system, and the draft's training counters behind the rollouts of each."""

    steps: list[Any]
    counters: list[dict[str, int]]


def measure(loop: ModuleType, flags: Sequence[str], texts: Sequence[str], args: argparse.Namespace) -> Run:
    """A run on one system, with the policy as it was published."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    prompts, reward = loop.capitals(AutoTokenizer.from_pretrained(args.model), texts)
    key = ADMIN_HEADERS["authorization"].removeprefix("Bearer ")
    running = args.prompts_per_step * args.count
    counters: list[dict[str, int]] = []
    with served(args.model, flags, args.dtype, running) as url, contextlib.closing(loop.Engine(url, key)) as engine:
        push = engine.push

        def counted(model: Any, version: str) -> None:
            counters.append(learning_counters(httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text))
            push(model, version)

        engine.push = counted
        steps: list[Any] = loop.train(
            model, engine, prompts, reward, steps=args.steps, count=args.count, max_tokens=args.max_tokens,
            rate=args.rate, batch=args.batch, each=args.prompts_per_step,
        )  # fmt: skip
    return Run(steps, counters[1:])  # the first push is before the first step


def add_rows(report: Report, online: Run, frozen: Run) -> None:
    """Add a row per step. online, frozen: the runs with and without online training."""
    pairs = zip(online.steps, frozen.steps, online.counters, strict=True)
    for number, (trained, untrained, counters) in enumerate(pairs, start=1):
        report.add(
            step=number,
            draft_steps=counters.get("steps", 0),
            kept=counters.get("kept", 0),
            reward=round(untrained.reward, 3),
            reward_online=round(trained.reward, 3),
            online=round(trained.accept_length, 3),
            frozen=round(untrained.accept_length, 3),
            gap=f"{max(trained.gap, untrained.gap):.1e}",
            same=min(trained.same, untrained.same),
            speculated_seconds=round(untrained.speculated_seconds, 1),
            online_seconds=round(trained.speculated_seconds, 1),
            plain_seconds=round(untrained.plain_seconds, 1),
            train_seconds=round(untrained.train_seconds, 1),
            push_seconds=round(untrained.push_seconds, 2),
        )


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/rollouts.*."""
    parser = argparse.ArgumentParser(prog="outrider bench rollouts", description=__doc__)
    parser.add_argument("prompts", type=Path, help='JSON lines with "prompt"')
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--dtype", default="float32", help="number format of the target; the trainer's is float32")
    parser.add_argument("--steps", type=positive_int, default=8)
    parser.add_argument("--prompts-per-step", type=positive_int, default=4)
    parser.add_argument("--count", type=positive_int, default=4, help="answers to a prompt")
    parser.add_argument("--max-tokens", type=positive_int, default=64, help="maximum tokens of an answer")
    parser.add_argument("--rate", type=float, default=2e-5, help="learning rate of the policy")
    parser.add_argument("--batch", type=positive_int, default=8, help="answers in a forward pass of the trainer")
    parser.add_argument("--share", type=float, default=0.5, help="share of time for the draft's training")
    parser.add_argument("--draft-rate", type=float, default=3e-4, help="learning rate of the draft")
    parser.add_argument("--flags", type=shlex.split, default=_FLAGS,
                        help="flags of both systems, as one argument; default: the bundled head")  # fmt: skip
    args = parser.parse_args(argv)
    texts = [prompt.turns[0] for prompt in load_prompts(parser, args.prompts)]
    args.model = str(resolve(args.model_path))
    training = ["--online", "--online-share", str(args.share), "--online-learning-rate", str(args.draft_rate)]
    report = Report("rollouts", "Reinforcement learning with rollouts by Outrider")
    report.notes = _notes(args)
    loop = example()
    frozen = measure(loop, args.flags, texts, args)
    add_rows(report, measure(loop, [*args.flags, *training], texts, args), frozen)
    plot(report)
    report.write()


def _notes(args: argparse.Namespace) -> list[str]:
    return [
        f"{Path(args.model).name}, {args.dtype}, {args.steps} steps of {args.prompts_per_step} "
        f"prompts of {args.prompts.name}, {args.count} answers to each of at most {args.max_tokens} tokens, "
        "temperature 1; the reward is the share of capital letters",
        f"online: --online with a share of {args.share:g} of the time, learning rate {args.draft_rate:g}; "
        f"both: {' '.join(Path(flag).name if '/' in flag else flag for flag in args.flags)}",
        "draft_steps, kept: training steps of the draft and weights that it took over, before the step's push",
        "online, frozen: accept length of a step's rollouts (tokens per verification, bonus included), with and "
        "without online training of the draft; step 1 is before the first update of the policy",
        "gap: largest difference between the engine's log-probabilities and the trainer's; same: share of answers that "
        "are equal without speculation",
        "seconds of the run without online training: rollouts with and without speculation, training, pushing the "
        "weights; online_seconds: rollouts with the draft that learns",
    ]


def plot(report: Report) -> None:
    """Accept length and reward by step."""
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    steps = [row["step"] for row in report.rows]
    for name, style in (("online", "o-"), ("frozen", "s--")):
        axes.plot(steps, [row[name] for row in report.rows], style, label=f"accept length, {name}")
    axes.set(xlabel="step of the policy", ylabel="accept length", title="drafts behind a moving policy")
    axes.set_ylim(bottom=1.0)
    beside = axes.twinx()
    beside.plot(steps, [row["reward"] for row in report.rows], "^:", color="gray", label="reward")
    beside.set_ylabel("reward")
    axes.legend(handles=[*axes.get_lines(), *beside.get_lines()])
    report.save(figure)
