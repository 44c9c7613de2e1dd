"""What narrow weights and caches cost in quality: the target's next-token distributions against float32's.

Float32 answers prompts greedily; then every number format reads the same prompts and answers, and says at each token of
the answers what it would have said there.

top-1       how often its likeliest token is float32's
KL          mean Kullback-Leibler divergence of its distribution from float32's, in nats
perplexity  of the answers, divided by float32's

A checkpoint that was made from 4-bit weights favours formats with the same grid, and is rounded twice by all others.
The page says so where its weights take no more than 16 values in a block of 32.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer

from bench.harness.flags import prompts_in, whole
from bench.harness.report import Report
from bench.services.target import GREEDY
from outrider.checkpoints import checkpoint
from outrider.config import TargetConfig
from outrider.serving.messages import OpenSession
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.sampling import StopConditions
from services.target.engine.engine import TargetEngine
from services.target.process.app import build_engine
from services.target.step.batch import SessionWork, build

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
THREADS = torch.get_num_threads()  # a program that is loaded leaves PyTorch one
BLOCK, NARROW_LEVELS = 32, 16  # of 4-bit GGUF formats
LAYERS_READ, ROWS_READ = 7, 16
FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "bfloat16, KV cache fp8_e4m3": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
    "bfloat16, KV cache fp8_e5m2": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"},
}


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/quality.*."""
    parser = argparse.ArgumentParser(prog="outrider bench quality", description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="prompts, as of `bench serve`; first turns")
    parser.add_argument("--count", type=whole, default=64, help="prompts, at most")
    parser.add_argument("--tokens", type=whole, default=128, help="of an answer, at most")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS)[1:], default=list(FORMATS)[1:])
    args = parser.parse_args(argv)
    asked = prompts_in(parser, args.prompts)
    folder = checkpoint.resolve(args.model)
    prompts = rendered(folder, [prompt.turns[0] for prompt in asked[: args.count]])
    engine = engine_of(folder, "float32")
    texts = answers(engine, prompts, args.tokens)
    right = [distributions(engine, text, len(prompt)) for prompt, text in zip(prompts, texts, strict=True)]
    report = Report("quality", "What narrow weights and caches cost in quality")
    for name in args.formats:
        engine = engine_of(folder, name)
        found = [distributions(engine, text, len(prompt)) for prompt, text in zip(prompts, texts, strict=True)]
        report.add(**{"format": name, **compared(texts, prompts, right, found)})
    count = sum(len(one) for one in right)
    report.notes += [
        f"{len(prompts)} prompts of {args.prompts.name}, {count} tokens of answers; int8 and int4 compute in bfloat16",
        "top-1: share of tokens where the likeliest is float32's; KL: mean divergence from float32's, in nats",
        "perplexity: of float32's greedy answers, divided by float32's own",
    ]
    if (levels := levels_of(folder)) <= NARROW_LEVELS:
        report.notes.append(
            f"the checkpoint's own weights take at most {levels} values in a block of {BLOCK}: they were 4 bits once, "
            "which int4 finds again and int8 rounds a second time: these figures do not rank formats for other models"
        )
    report.write()


def rendered(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of prompts as the model's chat template puts them, if it has one."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        return [tokenizer.encode(text) for text in texts]
    messages = [[{"role": "user", "content": text}] for text in texts]
    said = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return [tokenizer.encode(text, add_special_tokens=False) for text in said]


def engine_of(folder: Path, name: str) -> TargetEngine:
    """An engine on the CPU in a number format, with all the threads that there are."""
    torch.set_num_threads(THREADS)
    config = TargetConfig(
        device="cpu", max_total_tokens=16 * 1024, disable_radix_cache=True, self_speculation="off", **FORMATS[name]
    )
    return build_engine(folder, config)


def answers(engine: TargetEngine, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Prompts and the greedy answers to them."""
    texts = {i: list(prompt) for i, prompt in enumerate(prompts, 1)}
    for i, prompt in texts.items():
        engine.open(opening(i, prompt, tokens))
    while not engine.idle:
        for commit in engine.step().commits:
            texts[commit.session_id] += commit.tokens.tolist()
    return list(texts.values())


def opening(session_id: int, tokens: list[int], new: int) -> OpenSession:
    """A greedy session."""
    return OpenSession(session_id, np.array(tokens, np.uint32), len(tokens), GREEDY, StopConditions(new))


def distributions(engine: TargetEngine, text: list[int], first: int) -> Tensor:
    """Log-probabilities of all tokens at places first .. of a text, [n, V] float32."""
    session = Session(opening(1, text, 1), engine.scheduler.prefix)
    session.to_score, session.scored = len(text) - 1, first - 1
    session.table.reserve(len(text))
    batch = build([SessionWork(Chunk(session, 0, len(text)))], torch.device("cpu"))
    logits = engine.model.runner.forward(batch, engine.cache).logits
    session.table.release()
    return logits[batch.drawn :].log_softmax(dim=-1)


def levels_of(folder: Path) -> int:
    """Most values that weights of the checkpoint's first linear layers take in a block of 32 along their inputs."""
    most = 0
    for path in checkpoint.weight_files(folder)[:1]:
        with safe_open(path, "pt") as tensors:
            for name in [name for name in tensors.keys() if name.endswith("_proj.weight")][:LAYERS_READ]:  # noqa: SIM118
                rows = tensors.get_tensor(name)[:ROWS_READ]
                blocks = rows[:, : rows.shape[1] // BLOCK * BLOCK].reshape(-1, BLOCK)
                most = max(most, *(len(block.unique()) for block in blocks))
    return most or BLOCK


def compared(
    texts: Sequence[list[int]], prompts: Sequence[list[int]], right: Sequence[Tensor], found: Sequence[Tensor]
) -> dict[str, float]:
    """A format's figures."""
    agree, divergence, likelihood, count = 0.0, 0.0, 0.0, 0
    for text, prompt, ours, theirs in zip(texts, prompts, found, right, strict=True):
        said = torch.tensor(text[len(prompt) :])[:, None]
        agree += float((ours.argmax(1) == theirs.argmax(1)).sum())
        divergence += float((theirs.exp() * (theirs - ours)).sum())
        likelihood += float((theirs.gather(1, said) - ours.gather(1, said)).sum())
        count += len(said)
    return {
        "top-1": f"{agree / count:.1%}",
        "KL": f"{divergence / count:.4f}",
        "perplexity / float32": f"{np.exp(likelihood / count):.3f}",
    }
