"""Speed of a whole system with a draft service, with frames over gRPC and over a socket beside it.

Two systems of each setting run at a time, one with each transport, and answer every prompt one after the other, in
turns. The gain of a setting is the geometric mean of the ratios of their speeds, with a confidence interval over the
prompts. Self-speculation is off, so that all draft tokens cross the streams. The n-gram drafter answers all prompts
twice before it is measured, because it drafts what was answered before.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.harness.errors import BenchError
from bench.harness.prompts import read_prompts
from bench.harness.ratios import ratio
from bench.harness.report import Report
from bench.serve.outrider_system import served

_CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
_INT8 = ("--quantization", "int8")


class Setting(NamedTuple):
    """A system. rehearsals: rounds over all prompts before the first measured one."""

    dtype: str
    flags: tuple[str, ...]
    rehearsals: int = 0


# With a chain of fixed length every step waits for a proposal, and is never plain.
SETTINGS = {
    "EAGLE3 chain, bfloat16": Setting("bfloat16", ("--speculative-algorithm", "EAGLE3", *_CHAIN)),
    "EAGLE3 chain, int8": Setting("bfloat16", (*_INT8, "--speculative-algorithm", "EAGLE3", *_CHAIN)),
    "EAGLE3 adaptive, int8": Setting("bfloat16", (*_INT8, "--speculative-algorithm", "EAGLE3")),
    "NGRAM adaptive, known answers, int8": Setting("bfloat16", (*_INT8, "--speculative-algorithm", "NGRAM"), 2),
}
_ONLY_DRAFTS = ("--self-speculation", "off")
TRANSPORTS = ("grpc", "socket")
_PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"


def ask(url: str, prompt: str, tokens: int) -> tuple[str, float]:
    """The answer to a prompt, and its tokens/s."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    start = time.perf_counter()
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    return answer["choices"][0]["message"]["content"], tokens / (time.perf_counter() - start)


def metric(url: str, name: str, label: str = "") -> float:
    """Sum of a metric's samples that have this label."""
    lines = [line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines() if line[0] != "#"]
    return sum(float(value) for key, value in lines if key.split("{")[0] == name and label in key)


def measure(urls: dict[str, str], prompts: list[str], tokens: int, rounds: int, rehearsals: int) -> dict[str, Any]:
    """Speeds of both transports and the gain of the socket. Raises BenchError if one of them carried no draft token."""
    for url in urls.values():
        ask(url, prompts[0], 8)
        for prompt in rehearsals * prompts:
            ask(url, prompt, tokens)
    speeds: dict[str, list[float]] = {transport: [] for transport in urls}
    differences = 0
    for number in range(rounds):
        for prompt in prompts:
            texts = set()
            for transport in sorted(urls, reverse=bool(number % 2)):
                text, speed = ask(urls[transport], prompt, tokens)
                texts.add(text)
                speeds[transport].append(speed)
            differences += len(texts) > 1
    for transport, url in urls.items():
        if not metric(url, "outrider_stream_frames_total", f'transport="{transport}"'):
            raise BenchError(f"no frame went over {transport}")
        if metric(url, "outrider_accepted_draft_tokens_total") == 0:
            raise BenchError(f"no draft token was accepted over {transport}")
    gain = ratio([there / here for here, there in zip(speeds["grpc"], speeds["socket"], strict=True)])
    row: dict[str, Any] = {f"{transport}_tokens_s": sum(all_) / len(all_) for transport, all_ in speeds.items()}
    return row | {
        "socket_over_grpc": gain.mean, "low": gain.low, "high": gain.high, "different_texts": differences,
        "accept_length": metric(urls["grpc"], "outrider_accept_length"),
    }  # fmt: skip


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/transports.*."""
    parser = argparse.ArgumentParser(
        prog="outrider bench transports", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all prompts")
    args = parser.parse_args(argv)
    prompts = [prompt.turns[0] for prompt in read_prompts(_PROMPTS)]
    report = Report("transports", "A system with a draft service, frames over gRPC and over a socket")
    report.notes = [
        f"{len(prompts)} prompts one at a time, {args.max_tokens} tokens each, {args.rounds} rounds, in turns",
        "socket_over_grpc: ratio of the speeds, prompt by prompt; low, high: its 95 % confidence interval",
        "chain: a fixed number of draft tokens a step; adaptive: as many as pay, with pauses",
        "different_texts: prompts whose answers differ, which none may in float32 (rounding of the number format)",
    ]
    for name in args.setting:
        setting = SETTINGS[name]
        flags = (*setting.flags, *_ONLY_DRAFTS, "--stream-transport")
        with ExitStack() as systems:
            urls = {
                transport: systems.enter_context(served(args.model_path, (*flags, transport), setting.dtype))
                for transport in TRANSPORTS
            }
            row = measure(urls, prompts, args.max_tokens, args.rounds, setting.rehearsals)
            report.add(setting=name, **row)
    report.write()
