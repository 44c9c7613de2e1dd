"""The whole system against `transformers` generate, on the same weights, prompts and limits, alternating in one run.

Rows: drafter x concurrency. The system is started by `outrider serve` as a user would start it, and asked over REST;
`transformers` gets all cores and no HTTP. Every text is compared with the plain system's, which it must equal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.report import Report
from outrider.checkpoint import resolve

PROMPTS = Path(__file__).with_name("prompts.jsonl")
DRAFTERS = {
    "none": ["--speculative-algorithm", "NONE"],
    "NGRAM": ["--speculative-algorithm", "NGRAM"],
    "STANDALONE (self)": ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "{model}"],
}


def prompts(count: int) -> list[str]:
    """The first prompts of the file."""
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()][:count]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(model: str, flags: list[str], dtype: str) -> Iterator[str]:
    """`outrider serve` while the context lasts; yields its base URL."""
    port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "outrider", "serve", "--model-path", model, "--dtype", dtype]
    command += ["--port", str(port), "--grpc-port", str(grpc_port), "--log-level", "warning"]
    command += [flag.format(model=model) for flag in flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            time.sleep(0.25)
        else:
            raise RuntimeError(f"{' '.join(command)} was not ready in five minutes")
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


async def ask(
    url: str, texts: list[str], concurrency: int, body: dict[str, Any]
) -> tuple[float, int, list[dict[str, Any]]]:
    """All prompts, `concurrency` at a time. Returns seconds, new tokens and the answers in order of the prompts."""
    gate = asyncio.Semaphore(concurrency)

    async def one(client: httpx.AsyncClient, index: int, text: str) -> dict[str, Any]:
        async with gate:
            message = {"role": "user", "content": text}
            response = await client.post("/v1/chat/completions", json={**body, "seed": index, "messages": [message]})
            response.raise_for_status()
            answer: dict[str, Any] = response.json()
            return answer

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        start = time.perf_counter()
        answers = await asyncio.gather(*(one(client, i, text) for i, text in enumerate(texts)))
        elapsed = time.perf_counter() - start
    return elapsed, sum(a["usage"]["completion_tokens"] for a in answers), list(answers)


def transformers_generate(model: str, dtype: str, texts: list[str], max_tokens: int) -> tuple[float, int]:
    """Greedy `generate`, one prompt at a time, in a process of its own. Returns seconds and new tokens."""
    command = [sys.executable, "-m", "bench.plain_transformers", model, dtype, str(max_tokens)]
    result = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True)
    facts = json.loads(result.stdout.splitlines()[-1])
    return facts["seconds"], facts["tokens"]


def accept_length(answers: list[dict[str, Any]]) -> float | None:
    """Tokens per verification step, over all answers, from the usage that the gateway reports."""
    usage = [a["usage"] for a in answers]
    accepted = sum((u.get("completion_tokens_details") or {}).get("accepted_prediction_tokens") or 0 for u in usage)
    total = sum(u["completion_tokens"] for u in usage)
    return total / (total - accepted) if accepted else None


def main(argv: list[str]) -> None:
    """Run the benchmark and write docs/benchmarks/system.*."""
    parser = argparse.ArgumentParser(prog="python -m bench system", description=__doc__)
    parser.add_argument("--model-path", default="default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    args = parser.parse_args(argv)
    model = str(resolve(args.model_path))
    texts = prompts(args.prompts)
    report = Report("system", "Whole system against transformers generate: new tokens per second")
    report.notes = [
        f"{Path(model).name}, {args.dtype}",
        f"{len(texts)} prompts of bench/prompts.jsonl, at most {args.max_tokens} new tokens each",
        "ratio: tokens per second over those of `transformers` generate (one prompt at a time, all cores)",
        "same text: answers equal to those of the same system without a drafter, same seed",
    ]
    seconds, tokens = transformers_generate(model, args.dtype, texts, args.max_tokens)
    base = tokens / seconds
    report.add(system="transformers generate", temperature=0.0, concurrency=1, tokens_per_s=base, ratio=1.0)
    plain: dict[tuple[int, float], list[str]] = {}
    for name, flags in DRAFTERS.items():
        with served(model, flags, args.dtype) as url:
            asyncio.run(ask(url, texts[:2], 2, {"temperature": 0, "max_tokens": 16}))
            for temperature in args.temperature:
                for concurrency in args.concurrency:
                    body = {"temperature": temperature, "max_tokens": args.max_tokens}
                    seconds, tokens, answers = asyncio.run(ask(url, texts, concurrency, body))
                    contents = [a["choices"][0]["message"]["content"] for a in answers]
                    reference = plain.setdefault((concurrency, temperature), contents)
                    same = sum(a == b for a, b in zip(contents, reference, strict=True))
                    report.add(
                        system=f"outrider, {name}",
                        temperature=temperature,
                        concurrency=concurrency,
                        tokens_per_s=tokens / seconds,
                        ratio=tokens / seconds / base,
                        accept_length=accept_length(answers) or 1.0,
                        same_text=f"{same}/{len(texts)}",
                    )
    seconds, tokens = transformers_generate(model, args.dtype, texts, args.max_tokens)
    report.add(system="transformers generate, again", temperature=0.0, concurrency=1, tokens_per_s=tokens / seconds,
               ratio=tokens / seconds / base)  # fmt: skip
    report.write()
