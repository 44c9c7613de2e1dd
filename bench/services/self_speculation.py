"""Self-speculation of the target against plain decoding: two engines of one model alternate on the same prompts.

default  the default model, which was made from 4-bit weights: its int4 copy is lossless
noisy    the same with noise within each 4-bit step: its copies lose what they lose of general 16-bit weights

Each draft source is measured alone: quantized self-drafts (int4, int8), the local EAGLE head (`head`), and prompt
lookup (`text`). On a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from bench.harness.flags import load_prompts, positive_int
from bench.harness.prompts import BUNDLED_PROMPTS, Prompt, first_per_category
from bench.harness.report import Report
from outrider.checkpoints import checkpoint
from outrider.config import TargetConfig
from outrider.drafts import DEFAULT_HEAD
from outrider.serving.messages import OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions
from services.target.engine.engine import TargetEngine
from services.target.kernels.cpu.bandwidth import read_bandwidth
from services.target.kernels.cpu.matrices.weights import BLOCK, quantize_int4
from services.target.model.loading.load import load
from services.target.model.native import ProgramRunner
from services.target.process.warmup import warm_up
from services.target.speculation.modes.mode import SpeculationMode

MAX_PROMPT_TOKENS = 1000
MODES = ("plain", "self")
# Weights, their number format, and the draft source as in --self-draft.
CASES = (
    ("default", "bfloat16", "int4"), ("default", "bfloat16", "head"), ("default", "int8", "int4"),
    ("default", "bfloat16", "text"), ("default", "int8", "text"), ("default", "int4", "text"),
    ("default", "int8", "head"), ("default", "int4", "head"),
    ("noisy", "bfloat16", "int4"), ("noisy", "bfloat16", "int8"), ("noisy", "bfloat16", "head"),
)  # fmt: skip


class Totals(NamedTuple):
    """Totals of a mode after the first tokens. steps: counted for each session, if it committed."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def plus(self, other: Totals) -> Totals:
        """The sum of both."""
        return Totals(
            self.tokens + other.tokens, self.seconds + other.seconds, self.steps + other.steps,
            self.drafted + other.drafted, self.accepted + other.accepted,
        )  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/self-speculation.*."""
    parser = argparse.ArgumentParser(prog="outrider bench self-speculation", description=__doc__)
    parser.add_argument("--prompts", type=Path, default=BUNDLED_PROMPTS, help="file of prompts, as in `bench serve`")
    parser.add_argument("--limit", type=positive_int, default=2, help="prompts per category")
    parser.add_argument("--max-tokens", type=positive_int, default=96, help="tokens of an answer")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--sessions", nargs="+", type=positive_int, default=[1, 2, 4, 8], help="concurrent sessions")
    args = parser.parse_args(argv)
    available = first_per_category(load_prompts(parser, args.prompts), args.limit)
    report = Report("self-speculation", "Self-speculation of the target against plain decoding, on a CPU")
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        folders = {"default": checkpoint.resolve("default")}
        folders["noisy"] = write_noisy(folders["default"], Path(folder))
        prompts = tokens_of(folders["default"], available)
        for weights, number_format, source in CASES:
            torch.set_num_threads(threads)  # loading a compiled program sets PyTorch's threads to 1
            engines = engines_of(folders[weights], number_format, source, max(args.sessions))
            for temperature in args.temperatures:
                for sessions in args.sessions if weights == "default" else args.sessions[:1]:
                    params = SamplingParams(temperature, seed=7)
                    row = compare(engines, prompts, params, sessions, args.max_tokens)
                    report.add(
                        weights=weights, format=number_format, source=source, temperature=temperature,
                        sessions=sessions, **row,
                    )  # fmt: skip
    report.notes += [
        f"{len(prompts)} prompts, {args.max_tokens} tokens after each; all texts are equal in both modes",
        "source: of draft tokens; plain, self: tokens/s of all sessions without and with self-speculation, prefill "
        "excluded; speedup: self / plain",
        "accept length: tokens per step, bonus included; draft tokens: per step; acceptance rate: accepted / drafted",
        "floor ms: reading the weights for drafting and verification, per committed token",
    ]
    report.write()


def tokens_of(folder: Path, prompts: Sequence[Prompt]) -> list[NDArray[np.uint32]]:
    """Token ids of prompts, rendered with the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": one.turns[0]}] for one in prompts]
    ids = (tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats)
    return [np.array(one[:MAX_PROMPT_TOKENS], np.uint32) for one in ids]


def write_noisy(source: Path, folder: Path) -> Path:
    """Write a model with uniform noise on its layers' weights, as wide as a step of int4. Returns its folder."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = module.weight.data
            _, scales, _ = quantize_int4(weight)
            steps = scales.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
            weight += (torch.rand(weight.shape, generator=generator) - 0.5) * steps
    model.bfloat16().save_pretrained(folder)
    return folder


def engines_of(folder: Path, number_format: str, source: str, sessions: int) -> dict[str, TargetEngine]:
    """An engine of one model for each of MODES. source: as in CASES."""
    flags: dict[str, Any] = {"dtype": number_format} if number_format == "bfloat16" else {"quantization": number_format}
    config = TargetConfig(
        device="cpu", self_speculation=cast(Any, {"text": "lookup", "head": "head"}.get(source, "quantized")),
        self_speculation_format=cast(Any, source if source in ("int4", "int8") else "auto"),
        self_speculation_head=str(DEFAULT_HEAD) if source == "head" else None,
        max_running_requests=sessions, max_total_tokens=32 * 1024, disable_radix_cache=True, **flags,
    )  # fmt: skip
    model = load(folder, config)
    works = SpeculationMode.NONE, SpeculationMode.SELF_SPECULATE
    engines = {mode: TargetEngine(model, config, (work,)) for mode, work in zip(MODES, works, strict=True)}
    for mode, engine in engines.items():
        warm_up(engine)
        chooser = engine.speculation.chooser
        assert chooser is not None, "the flags ask for a draft source"
        chooser.looks_up, chooser.always = (mode, source) == ("self", "text"), True
    return engines


def compare(
    engines: dict[str, TargetEngine],
    prompts: Sequence[NDArray[np.uint32]],
    params: SamplingParams,
    sessions: int,
    count: int,
) -> dict[str, float]:
    """A row of the report."""
    sums = dict.fromkeys(MODES, Totals())
    for first in range(0, len(prompts) - sessions + 1, sessions):
        texts = []
        for mode in MODES if first // sessions % 2 else reversed(MODES):
            totals, answers = run(engines[mode], prompts[first : first + sessions], params, count)
            sums[mode] = sums[mode].plus(totals)
            texts.append(answers)
        assert texts[0] == texts[1], "self-speculation never changes the text"
    runner = engines["self"].model.runner
    assert isinstance(runner, ProgramRunner), "self-speculation needs the compiled program"
    plain, own = (sums[mode].tokens / sums[mode].seconds for mode in MODES)
    total = sums["self"]
    drafting = total.drafted / sessions * runner.draft_bytes * runner.drafts
    read = drafting + total.steps / sessions * runner.weight_bytes
    return {
        "plain": plain, "self": own, "speedup": own / plain, "accept length": total.tokens / total.steps,
        "draft tokens": total.drafted / total.steps, "acceptance rate": total.accepted / max(total.drafted, 1),
        "ms per token": 1e3 * total.seconds / total.tokens,
        "floor ms": 1e3 * read / read_bandwidth(runner.threads) / total.tokens,
    }  # fmt: skip


def run(
    engine: TargetEngine, prompts: Sequence[NDArray[np.uint32]], params: SamplingParams, count: int
) -> tuple[Totals, dict[int, list[int]]]:
    """Run sessions to their end. Returns totals after the first tokens, and the new tokens of each session."""
    texts: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        engine.open(OpenSession(i, prompt, len(prompt), params, StopConditions(count, ignore_eos=True)))
        texts[i] = []
    while not all(texts.values()):
        for commit in engine.step().commits:
            texts[commit.session_id] += commit.tokens.tolist()
    before = sum(map(len, texts.values()))
    steps = drafted = accepted = 0
    start = time.perf_counter()
    while not engine.idle:
        for commit in engine.step().commits:
            texts[commit.session_id] += commit.tokens.tolist()
            steps, drafted, accepted = steps + 1, drafted + commit.verified, accepted + commit.accepted
    seconds = time.perf_counter() - start
    return Totals(sum(map(len, texts.values())) - before, seconds, steps, drafted, accepted), texts
