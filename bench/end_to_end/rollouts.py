"""Reinforcement learning with rollouts by Outrider: reward, accept length and wall time by step.

The loop is that of docs/examples/rollouts.py: GRPO in PyTorch, weights pushed by tensors after every step, to two
systems whose drafts do and do not learn from the rollouts (`--online`); both drafts follow the weights that they share
with the target. Answers to the prompts of a file are to be in capital letters, so that the policy moves away from its
draft.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import httpx

from bench.end_to_end.online import learning_counters
from bench.harness.errors import BenchError
from bench.harness.flags import load_prompts, positive_int
from bench.harness.ratios import resampled
from bench.harness.report import Report, new_figure
from bench.serve.outrider_system import ADMIN_HEADERS, served
from outrider.checkpoints.checkpoint import resolve
from outrider.drafts import DEFAULT_HEAD

_EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "rollouts.py"

# A chain of three draft tokens, as slime's recipes have it: in large batches trees cost more than they gain.
_FLAGS = (
    f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {DEFAULT_HEAD} --speculative-always "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)


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


class Rollouts(NamedTuple):
    """A step's rollouts on the system whose draft does not train online, and the training counters of the other's.

    same: share of its answers that are equal to those of the other; seconds, online_seconds: of both
    """

    accept_length: float
    same: float
    seconds: float
    online_seconds: float
    counters: dict[str, int]


class Systems:
    """Two systems with the interface of the loop's engine. The policy learns from the answers of the one whose draft
    trains online; the other is asked the same, so that drafts are compared on one policy and one text.
    """

    def __init__(self, online: Any, frozen: Any, counters: Callable[[], dict[str, int]]) -> None:
        """online, frozen: engines of the loop. counters: of the draft that trains."""
        self._online, self._frozen, self._counters = online, frozen, counters
        self.done: list[Rollouts] = []

    def push(self, *sent: Any) -> None:
        """Send a model's weights to both; as of the loop's engine."""
        self._online.push(*sent)
        self._frozen.push(*sent)

    def generate(self, *asked: Any, speculation: str = "auto", **options: Any) -> list[Any]:
        """As of the loop's engine. Without speculation both systems do the same, so one is asked."""
        began = time.perf_counter()
        answers: list[Any] = self._online.generate(*asked, speculation=speculation, **options)
        if speculation == "off":
            return answers
        middle, counters = time.perf_counter(), self._counters()
        beside = self._frozen.generate(*asked, speculation=speculation, **options)
        tokens, steps = (sum(sums) for sums in zip(*((len(a.tokens), a.verifications) for a in beside), strict=True))
        same = sum(one.tokens == other.tokens for one, other in zip(answers, beside, strict=True)) / len(answers)
        seconds = time.perf_counter() - middle
        self.done.append(Rollouts(tokens / max(steps, 1), same, seconds, middle - began, counters))
        return answers


def measure(
    loop: ModuleType, online: Sequence[str], frozen: Sequence[str], texts: Sequence[str], args: argparse.Namespace
) -> list[tuple[Any, Rollouts]]:
    """Train the policy as it was published. online, frozen: flags of the systems. Each step, with what is beside it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    prompts, reward = loop.capitals(AutoTokenizer.from_pretrained(args.model), texts)
    prompts = [prompt for prompt in prompts if len(prompt) <= args.prompt_tokens]
    if not prompts:
        raise BenchError(f"every prompt has more than {args.prompt_tokens} tokens; raise --prompt-tokens")
    key = ADMIN_HEADERS["authorization"].removeprefix("Bearer ")
    running = args.prompts_per_step * args.count
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(served(args.model, flags, args.dtype, running)) for flags in (online, frozen)]
        engines = [stack.enter_context(contextlib.closing(loop.Engine(url, key))) for url in urls]

        def counters() -> dict[str, int]:
            return learning_counters(httpx.get(f"{urls[0]}/metrics", timeout=60).raise_for_status().text)

        systems = Systems(engines[0], engines[1], counters)
        steps: list[Any] = loop.train(
            model, systems, prompts, reward, steps=args.steps, count=args.count, trained=args.trained,
            max_tokens=args.max_tokens, rate=args.rate, batch=args.batch, each=args.prompts_per_step,
            minutes=args.minutes, dtype=getattr(torch, args.trainer_dtype),
        )  # fmt: skip
    return list(zip(steps, systems.done, strict=True))


def add_rows(report: Report, steps: Sequence[tuple[Any, Rollouts]]) -> None:
    """Add a row per step."""
    for number, (step, beside) in enumerate(steps, start=1):
        report.add(
            step=number,
            reward=round(step.reward, 3),
            frozen=round(beside.accept_length, 3),
            online=round(step.accept_length, 3),
            over_frozen=round(step.accept_length / beside.accept_length, 3),
            draft_steps=beside.counters.get("steps", 0),
            kept=beside.counters.get("kept", 0),
            gap=f"{step.gap:.1e}",
            largest_gap=f"{step.largest_gap:.1e}",
            same=min(step.same, beside.same),
            plain_seconds=round(step.plain_seconds, 1),
            frozen_seconds=round(beside.seconds, 1),
            online_seconds=round(beside.online_seconds, 1),
            train_seconds=round(step.train_seconds, 1),
            push_seconds=round(step.push_seconds / 2, 2),
        )


def gain(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Mean accept length with online training over that without, and its 95 % interval over random choices of steps."""

    def of(chosen: Sequence[dict[str, Any]]) -> float:
        online, frozen = (sum(row[name] for row in chosen) for name in ("online", "frozen"))
        return float(online / frozen)

    return resampled(rows, of)


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/rollouts.*, with other formats of the target rollouts-FORMAT.*."""
    parser = argparse.ArgumentParser(prog="outrider bench rollouts", description=__doc__)
    parser.add_argument("prompts", type=Path, help='JSON lines with "prompt"')
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--dtype", default="bfloat16", help="number format of the target")
    parser.add_argument("--trainer-dtype", choices=("float32", "bfloat16"), default="bfloat16",
                        help="number format of the trainer's forward pass; its weights are float32")  # fmt: skip
    parser.add_argument("--steps", type=positive_int, default=8)
    parser.add_argument("--minutes", type=float, default=math.inf, help="time after which no further step begins")
    parser.add_argument("--prompts-per-step", type=positive_int, default=4)
    parser.add_argument("--prompt-tokens", type=positive_int, default=512,
                        help="maximum tokens of a prompt with its template; longer ones are left out")  # fmt: skip
    parser.add_argument("--count", type=positive_int, default=4, help="answers to a prompt")
    parser.add_argument("--trained", type=positive_int,
                        help="answers to a prompt that are trained: the best and the worst (default: all)")  # fmt: skip
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
    name = "rollouts" if args.dtype == "bfloat16" else f"rollouts-{args.dtype}"
    report = Report(name, "Reinforcement learning with rollouts by Outrider")
    add_rows(report, measure(example(), [*args.flags, *training], args.flags, texts, args))
    last = report.rows[len(report.rows) // 2 :]
    mean, low, high = gain(last)
    report.notes = _notes(args)
    report.notes.append(
        f"steps {last[0]['step']} to {last[-1]['step']}: mean accept length {mean:.2f} ({low:.2f} to {high:.2f}) times "
        "that without online training, with the 95 % interval over steps"
    )
    plot(report)
    report.write()


def _notes(args: argparse.Namespace) -> list[str]:
    trained = f" of which the best and the worst, {args.trained} in all, are trained" if args.trained else ""
    return [
        f"{Path(args.model).name}, target {args.dtype}, trainer's forward pass {args.trainer_dtype}, steps "
        f"of {args.prompts_per_step} prompts of at most {args.prompt_tokens} tokens of {args.prompts.name}, "
        f"{args.count} answers to each of at most "
        f"{args.max_tokens} tokens{trained}, temperature 1, learning rate {args.rate:g}; the reward is the share of "
        "capital letters",
        f"online: --online with a share of {args.share:g} of the time, learning rate {args.draft_rate:g}; "
        f"both: {' '.join(Path(flag).name if '/' in flag else flag for flag in args.flags)}",
        "frozen, online: accept length of a step's rollouts (tokens per verification, bonus included) on two systems "
        "with the same weights, without and with online training of the draft; step 1 is before the first update",
        "draft_steps, kept: training steps of the draft and weights that it took over, before a step's training",
        "gap, largest_gap: difference between the engine's log-probabilities and the trainer's, root mean square and "
        "of the token with the largest; same: share of answers that are equal on both and without speculation",
        "seconds of rollouts without speculation and with it on each system, of training, and of pushing the weights "
        "to one; target, draft and trainer share the machine, and the draft trains all the while",
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
    axes.legend(handles=[*axes.get_lines(), *beside.get_lines()], loc="center left")
    report.save(figure)
