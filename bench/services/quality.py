"""Loss of quality by quantized weights and KV caches: next-token distributions of the target against float32's.

The float32 model answers prompts greedily. Then each number format computes its distributions at all tokens of the same
answers.

top-1       share of tokens at which the most likely token equals float32's
KL          mean Kullback-Leibler divergence from float32's distribution, in nats
perplexity  of the answers, divided by float32's

A checkpoint made from 4-bit weights favours formats with the same grid; other formats round it a second time. The page
has a note if its weights have at most 16 distinct values in a block of 32.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer

from bench.harness.flags import load_prompts, positive_int
from bench.harness.prompts import BUNDLED_PROMPTS
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

THREADS = torch.get_num_threads()  # loading a compiled program sets PyTorch's threads to 1
BLOCK, NARROW_LEVELS = 32, 16  # of 4-bit GGUF formats
LAYERS_READ, ROWS_READ = 7, 16
FORMATS: dict[str, dict[str, Any]] = {
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
    parser.add_argument("--prompts", type=Path, default=BUNDLED_PROMPTS, help="file of prompts, as in `bench serve`; "
                        "first turns are used")  # fmt: skip
    parser.add_argument("--count", type=positive_int, default=64, help="maximum number of prompts")
    parser.add_argument("--tokens", type=positive_int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS)[1:], default=list(FORMATS)[1:],
                        help="number formats to compare (default: all)")  # fmt: skip
    args = parser.parse_args(argv)
    available = load_prompts(parser, args.prompts)
    folder = checkpoint.resolve(args.model)
    prompts = rendered(folder, [prompt.turns[0] for prompt in available[: args.count]])
    engine = engine_of(folder, "float32")
    texts = answers(engine, prompts, args.tokens)
    reference = [distributions(engine, text, len(prompt)) for prompt, text in zip(prompts, texts, strict=True)]
    report = Report("quality", "Loss of quality by quantized weights and KV caches")
    for name in args.formats:
        engine = engine_of(folder, name)
        found = [distributions(engine, text, len(prompt)) for prompt, text in zip(prompts, texts, strict=True)]
        report.add(**{"format": name, **compared(texts, prompts, reference, found)})
    count = sum(len(one) for one in reference)
    report.notes += [
        f"{len(prompts)} prompts of {args.prompts.name}, {count} tokens of answers; int8 and int4 compute in bfloat16",
        "top-1: share of tokens at which the most likely token equals float32's; KL: mean divergence, in nats",
        "perplexity: of float32's greedy answers, divided by float32's perplexity",
    ]
    if (levels := levels_of(folder)) <= NARROW_LEVELS:
        report.notes.append(
            f"the checkpoint's weights have at most {levels} distinct values in a block of {BLOCK}: they were made "
            "from 4-bit weights, which int4 restores and int8 rounds again; do not rank formats for other models by it"
        )
    report.write()


def rendered(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of prompts, rendered with the model's chat template if it has one."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        return [tokenizer.encode(text) for text in texts]
    messages = [[{"role": "user", "content": text}] for text in texts]
    chats = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return [tokenizer.encode(text, add_special_tokens=False) for text in chats]


def engine_of(folder: Path, name: str) -> TargetEngine:
    """An engine on the CPU in a number format, with all threads."""
    torch.set_num_threads(THREADS)
    config = TargetConfig(
        device="cpu", max_total_tokens=16 * 1024, disable_radix_cache=True, self_speculation="off", **FORMATS[name]
    )
    return build_engine(folder, config)


def answers(engine: TargetEngine, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """The token ids of prompts, each followed by its greedy answer."""
    texts = {i: list(prompt) for i, prompt in enumerate(prompts, 1)}
    for i, prompt in texts.items():
        engine.open(open_request(i, prompt, tokens))
    while not engine.idle:
        for commit in engine.step().commits:
            texts[commit.session_id] += commit.tokens.tolist()
    return list(texts.values())


def open_request(session_id: int, tokens: list[int], new: int) -> OpenSession:
    """A greedy session."""
    return OpenSession(session_id, np.array(tokens, np.uint32), len(tokens), GREEDY, StopConditions(new))


def distributions(engine: TargetEngine, text: list[int], first: int) -> Tensor:
    """Log-probabilities of all tokens at positions `first` and later of a text: [n, V] float32."""
    session = Session(open_request(1, text, 1), engine.scheduler.prefix)
    session.scores.needed, session.scores.computed = len(text) - 1, first - 1
    session.table.reserve(len(text))
    batch = build([SessionWork(Chunk(session, 0, len(text)))], torch.device("cpu"))
    logits = engine.model.runner.forward(batch, engine.cache).logits
    session.table.release()
    return logits[batch.sample_count :].log_softmax(dim=-1)


def levels_of(folder: Path) -> int:
    """Maximum number of distinct values in a block of 32 inputs, in the checkpoint's first linear layers."""
    largest = 0
    for path in checkpoint.weight_files(folder)[:1]:
        with safe_open(path, "pt") as tensors:
            for name in [name for name in tensors.keys() if name.endswith("_proj.weight")][:LAYERS_READ]:  # noqa: SIM118
                rows = tensors.get_tensor(name)[:ROWS_READ]
                blocks = rows[:, : rows.shape[1] // BLOCK * BLOCK].reshape(-1, BLOCK)
                largest = max(largest, *(len(block.unique()) for block in blocks))
    return largest or BLOCK


def compared(
    texts: Sequence[list[int]], prompts: Sequence[list[int]], reference: Sequence[Tensor], found: Sequence[Tensor]
) -> dict[str, str]:
    """The figures of a format. reference, found: log-probabilities of float32 and of the format, by text."""
    agree, divergence, likelihood, count = 0.0, 0.0, 0.0, 0
    for text, prompt, ours, theirs in zip(texts, prompts, found, reference, strict=True):
        answer = torch.tensor(text[len(prompt) :])[:, None]
        agree += float((ours.argmax(1) == theirs.argmax(1)).sum())
        divergence += float((theirs.exp() * (theirs - ours)).sum())
        likelihood += float((theirs.gather(1, answer) - ours.gather(1, answer)).sum())
        count += len(answer)
    return {
        "top-1": f"{agree / count:.1%}",
        "KL": f"{divergence / count:.4f}",
        "perplexity / float32": f"{np.exp(likelihood / count):.3f}",
    }
