"""Drafts of the target's own against plain steps: two engines of one model, prompts in turns, on a CPU.

default  the default model, whose weights were four bits once: a copy in four bits loses nothing of them
noisy    the same with noise within each step of those four bits: what a copy loses of weights of sixteen bits

Copies, the head that comes along (`head`), and both (`int4+head`: it guesses for the copy) are measured by themselves;
`text` is what sessions' texts repeat, by itself.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bench.harness.flags import prompts_in, whole
from bench.harness.prompts import Prompt, first_of_each
from bench.harness.report import Report
from outrider.checkpoints import checkpoint
from outrider.config import TargetConfig
from outrider.drafts import DEFAULT_HEAD
from outrider.serving.messages import OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions
from services.target.engine.engine import TargetEngine
from services.target.kernels.cpu.bandwidth import read_bandwidth
from services.target.kernels.cpu.weights import BLOCK, quantize_int4
from services.target.model.loading.load import load
from services.target.model.native import ProgramRunner
from services.target.process.warmup import warm_up
from services.target.speculation.mode_selector import SpeculationMode

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
LONGEST = 1000  # tokens of a prompt
WAYS = ("plain", "own")
# Weights, their format, what drafts: the copy's format, a head, both, or the text
CASES = (
    ("default", "bfloat16", "int4"), ("default", "bfloat16", "int4+head"), ("default", "bfloat16", "head"),
    ("default", "int8", "int4"), ("default", "int8", "int4+head"),
    ("default", "bfloat16", "text"), ("default", "int8", "text"), ("default", "int4", "text"),
    ("default", "int8", "head"), ("default", "int4", "head"),
    ("noisy", "bfloat16", "int4"), ("noisy", "bfloat16", "int8"), ("noisy", "bfloat16", "int8+head"),
    ("noisy", "bfloat16", "head"),
)  # fmt: skip


class Sums(NamedTuple):
    """What a way did behind the first tokens. rounds: steps of single sessions that committed."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def plus(self, other: Sums) -> Sums:
        """Both together."""
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/self-draft.*."""
    parser = argparse.ArgumentParser(prog="outrider bench self-draft", description=__doc__)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines, as of `outrider bench serve`")
    parser.add_argument("--limit", type=whole, default=2, help="prompts of each category")
    parser.add_argument("--max-tokens", type=whole, default=96)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--sessions", nargs="+", type=whole, default=[1, 2, 4, 8])
    args = parser.parse_args(argv)
    asked = first_of_each(prompts_in(parser, args.prompts), args.limit)
    report = Report("self-draft", "Drafts of the target's own against plain steps, on a CPU")
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        folders = {"default": checkpoint.resolve("default")}
        folders["noisy"] = write_noisy(folders["default"], Path(folder))
        prompts = tokens_of(folders["default"], asked)
        for weights, number_format, drafts in CASES:
            torch.set_num_threads(threads)  # loading a program leaves PyTorch one
            engines = engines_of(folders[weights], number_format, drafts, max(args.sessions))
            for temperature in args.temperatures:
                for sessions in args.sessions if weights == "default" else args.sessions[:1]:
                    params = SamplingParams(temperature, seed=7)
                    row = compare(engines, prompts, params, sessions, args.max_tokens)
                    report.add(
                        weights=weights, format=number_format, drafts=drafts, temperature=temperature,
                        sessions=sessions, **row,
                    )  # fmt: skip
    report.notes += [
        f"{len(prompts)} prompts, {args.max_tokens} tokens after each; all texts are the same both ways",
        "plain, own: tokens a second of all sessions, prompts left aside; ratio: own / plain",
        "a step: one of the model, with what was drafted for it; right: of the tokens that were drafted",
        "floor: the time in which the weights of its drafts and its step can be read, for each token that they brought",
    ]
    report.write()


def tokens_of(folder: Path, prompts: Sequence[Prompt]) -> list[NDArray[np.uint32]]:
    """Prompts as the model is asked them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [[{"role": "user", "content": one.turns[0]}] for one in prompts]
    ids = (tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False) for turns in asked)
    return [np.array(one[:LONGEST], np.uint32) for one in ids]


def write_noisy(source: Path, folder: Path) -> Path:
    """A model with noise in its layers, as large as the steps of four bits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = module.weight.data
            _, scales, _ = quantize_int4(weight)
            steps = scales.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
            weight += (torch.rand(weight.shape, generator=generator) - 0.5) * steps
    model.bfloat16().save_pretrained(folder)
    return folder


def engines_of(folder: Path, number_format: str, drafts: str, sessions: int) -> dict[str, TargetEngine]:
    """Engines of one model that work in one way each. drafts: as of CASES."""
    narrow = {"dtype": number_format} if number_format == "bfloat16" else {"quantization": number_format}
    own = drafts.partition("+")[0]
    config = TargetConfig(
        device="cpu", self_speculation={"text": "lookup", "head": "head"}.get(own, "quantized"),
        self_speculation_format=own if own in ("int4", "int8") else "auto",
        self_speculation_head=str(DEFAULT_HEAD) if drafts.endswith("head") else None,
        max_running_requests=sessions, max_total_tokens=32 * 1024, disable_radix_cache=True, **narrow,
    )  # type: ignore[arg-type]  # fmt: skip
    model = load(folder, config)
    works = SpeculationMode.NONE, SpeculationMode.SELF_SPECULATE
    engines = {way: TargetEngine(model, config, (work,)) for way, work in zip(WAYS, works, strict=True)}
    for way, engine in engines.items():
        warm_up(engine)
        engine.speculation.chooser.looks_up = (way, drafts) == ("own", "text")
        engine.speculation.chooser.always = True
    return engines


def compare(
    engines: dict[str, TargetEngine],
    prompts: Sequence[NDArray[np.uint32]],
    params: SamplingParams,
    sessions: int,
    count: int,
) -> dict[str, float]:
    """A row of the report."""
    sums = dict.fromkeys(WAYS, Sums())
    for first in range(0, len(prompts) - sessions + 1, sessions):
        texts = []
        for way in WAYS if first // sessions % 2 else reversed(WAYS):
            some, said = run(engines[way], prompts[first : first + sessions], params, count)
            sums[way] = sums[way].plus(some)
            texts.append(said)
        assert texts[0] == texts[1], "drafts changed a text"
    runner = engines["own"].model.runner
    assert isinstance(runner, ProgramRunner), "only a compiled program drafts by itself"
    plain, own = (sums[way].tokens / sums[way].seconds for way in WAYS)
    done = sums["own"]
    read = done.drafted / sessions * runner.draft_bytes * runner.drafts + done.rounds / sessions * runner.weight_bytes
    return {
        "plain": plain, "own": own, "ratio": own / plain, "tokens a step": done.tokens / done.rounds,
        "drafted a step": done.drafted / done.rounds, "right": done.accepted / max(done.drafted, 1),
        "ms a token": 1e3 * done.seconds / done.tokens,
        "floor": 1e3 * read / read_bandwidth(runner.threads) / done.tokens,
    }  # fmt: skip


def run(
    engine: TargetEngine, prompts: Sequence[NDArray[np.uint32]], params: SamplingParams, count: int
) -> tuple[Sums, dict[int, list[int]]]:
    """Sessions from their first tokens on. Returns the texts, too."""
    said: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        engine.open(OpenSession(i, prompt, len(prompt), params, StopConditions(count, ignore_eos=True)))
        said[i] = []
    while not all(said.values()):
        for commit in engine.step().commits:
            said[commit.session_id] += commit.tokens.tolist()
    before = sum(map(len, said.values()))
    rounds = drafted = accepted = 0
    start = time.perf_counter()
    while not engine.idle:
        for commit in engine.step().commits:
            said[commit.session_id] += commit.tokens.tolist()
            rounds, drafted, accepted = rounds + 1, drafted + commit.verified, accepted + commit.accepted
    seconds = time.perf_counter() - start
    return Sums(sum(map(len, said.values())) - before, seconds, rounds, drafted, accepted), said
