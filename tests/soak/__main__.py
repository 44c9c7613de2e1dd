"""Clients with mixed requests against `outrider serve`, for an hour.

make soak                                          an hour, 32 clients, the default model
make soak ARGS="--seconds 600 --clients 8"         shorter
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.harness.errors import BenchError
from bench.harness.processes import free_port, start
from bench.serve.client import Events
from tests.soak.mixed import Request, requests

_SAMPLE_SECONDS = 5.0
_GROWTH = (1.03, 16.0)  # from the second quarter to the last: a factor, and MB
_MORE_FILES = 8
_WARNING = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|Traceback")
_LEAVES_AFTER = 3  # chunks


@dataclass(frozen=True)
class Options:
    """A load of mixed requests; texts must stay the same, memory flat, and no warning appear."""

    seconds: float = 3600.0
    """Duration of the load, in seconds."""
    clients: int = 32
    """Clients that send one request after the other."""
    model_path: str = "default"
    """Model of the started system."""
    requests: int = 240
    """Different requests, which the clients repeat."""
    seed: int = 0
    """Of the requests and their order."""
    log: str = "soak.log"
    """File for the output of the system's processes."""


@dataclass
class Load:
    """What the clients saw. texts: the answer to each request; wrong: what should not have been."""

    texts: dict[int, bytes] = field(default_factory=dict)
    answered: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def main(options: Options) -> int:
    """Run the load. Returns 1 if anything was not as it should be."""
    port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "outrider", "serve", "--model-path", options.model_path, "--port", str(port)]
    command += ["--grpc-port", str(grpc_port), "--log-level", "warning", "--max-running-requests", str(options.clients)]
    with open(options.log, "w+") as log:
        system = start(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            load, samples, begun = asyncio.run(_run(options, system, f"http://127.0.0.1:{port}"))
        finally:
            system.send_signal(signal.SIGINT)
            system.wait(60)
    faults = load.wrong + _grown(samples) + _warnings(Path(options.log), begun)
    for role, series in sorted(samples.items()):
        memory = [one for one, _ in series]
        print(f"{role}: {memory[0]:.0f} MB first, {max(memory):.0f} MB most, {memory[-1]:.0f} MB last; "
              f"{series[0][1]} files first, {series[-1][1]} last")  # fmt: skip
    print(f"{sum(load.answered.values())} answers: " + ", ".join(f"{n} {kind}" for kind, n in load.answered.items()))
    for fault, count in Counter(faults).most_common():
        print(f"{count} times: {fault}", file=sys.stderr)
    print(f"{int(not faults)} passed, {int(bool(faults))} failed")
    return 1 if faults else 0


async def _run(options: Options, system: subprocess.Popen[bytes], url: str) -> tuple[Load, dict[str, list[Any]], int]:
    """Returns what the clients saw, samples of each process, and where the log of the load begins."""
    load, samples = Load(), defaultdict(list)
    known = requests(options.requests, options.seed)
    timeout = aiohttp.ClientTimeout(total=300)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await _ready(session, url, system)
        begun = _size(options.log)
        end = time.monotonic() + options.seconds
        dice = random.Random(options.seed)
        tasks = [
            asyncio.create_task(_client(session, url, known, random.Random(dice.random()), load, end))
            for _ in range(options.clients)
        ]
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("soaking", total=options.seconds)
            while not all(one.done() for one in tasks):
                for role, memory, files in _processes(system.pid):
                    samples[role].append((memory, files))
                answers, wrong = sum(load.answered.values()), len(load.wrong)
                bar.update(task, completed=options.seconds - max(0.0, end - time.monotonic()))
                bar.update(task, description=f"{answers} answers, {wrong} wrong")
                await asyncio.wait(tasks, timeout=_SAMPLE_SECONDS)
        for one in tasks:
            one.result()
    return load, samples, begun


async def _client(
    session: aiohttp.ClientSession, url: str, known: list[Request], dice: random.Random, load: Load, end: float
) -> None:
    while time.monotonic() < end:
        index = dice.randrange(len(known))
        request = known[index]
        try:
            answer = await _ask(session, url, request)
        except (aiohttp.ClientError, OSError, TimeoutError, BenchError) as error:
            load.wrong.append(f"{request.kind}: {type(error).__name__}: {error}")
            await asyncio.sleep(1)
            continue
        load.answered[request.kind] += 1
        if not request.leaves and load.texts.setdefault(index, answer) != answer:
            load.wrong.append(f"{request.kind}: request {index} had another answer: {load.texts[index]!r}, {answer!r}")


async def _ask(session: aiohttp.ClientSession, url: str, request: Request) -> bytes:
    """The text of an answer, with its log-probabilities left out. Raises BenchError for an error."""
    events, parts = Events(), []
    async with session.post(url + request.path, json=request.body) as response:
        if response.status != 200:
            raise BenchError(f"HTTP {response.status}: {(await response.text())[:300]}")
        if response.content_type != "text/event-stream":
            return orjson.dumps(_texts(orjson.loads(await response.read())))
        async for data in response.content.iter_any():
            for event in events.feed(data):
                if event != b"[DONE]":
                    chunk = orjson.loads(event)
                    if "error" in chunk:
                        raise BenchError(f"error event: {chunk['error']}")
                    parts.append(_texts(chunk))
            if request.leaves and len(parts) >= _LEAVES_AFTER:
                response.close()
                break
    return orjson.dumps("".join(itertools.chain.from_iterable(parts)))


def _texts(content: Any) -> list[str]:
    """All texts that the model has written in an answer or a chunk, in order."""
    if isinstance(content, list):
        return [text for one in content for text in _texts(one)]
    if not isinstance(content, dict):
        return []
    texts = []
    for name, value in content.items():
        if name in ("text", "content", "arguments", "finish_reason") and isinstance(value, str):
            texts.append(value)
        elif name not in ("logprobs", "usage", "meta_info"):
            texts += _texts(value)
    return texts


async def _ready(session: aiohttp.ClientSession, url: str, system: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if system.poll() is not None:
            raise BenchError(f"the system ended with code {system.returncode}")
        try:
            async with session.get(f"{url}/health") as answer:
                if (await answer.json())["status"] == "ok":
                    return
        except (aiohttp.ClientError, OSError):
            pass
        await asyncio.sleep(0.5)
    raise BenchError("the system was not ready in five minutes")


def _processes(supervisor: int) -> list[tuple[str, float, int]]:
    """Role, resident memory in MB and open files of each process of the system."""
    rows = subprocess.run(["ps", "--ppid", str(supervisor), "-o", "pid=,rss=,args="], capture_output=True, text=True)
    found = []
    for row in rows.stdout.splitlines():
        pid, memory, words = row.split(None, 2)
        role = next((one for one in ("target", "draft", "gateway") if f"outrider {one}" in words), None)
        if role is not None:
            files = Path(f"/proc/{pid}/fd")
            found.append((role, int(memory) / 1024, len(list(files.iterdir())) if files.is_dir() else 0))
    return found


def _grown(samples: dict[str, list[tuple[float, int]]]) -> list[str]:
    """What has grown from the second quarter of the time, when caches are full, to the last one."""
    found = []
    for role, series in samples.items():
        quarter = max(1, len(series) // 4)
        early, late = series[quarter : 2 * quarter] or series[:1], series[-quarter:]
        factor, more = _GROWTH
        before, after = (statistics.median(memory for memory, _ in part) for part in (early, late))
        if after > before * factor + more:
            found.append(f"the {role}'s memory has grown from {before:.0f} to {after:.0f} MB")
        if late[-1][1] > early[0][1] + _MORE_FILES:
            found.append(f"the {role}'s open files have grown from {early[0][1]} to {late[-1][1]}")
    return found


def _size(file: str) -> int:
    return Path(file).stat().st_size


def _warnings(log: Path, begin: int) -> list[str]:
    """Warnings of the system's processes from a place of their log on, without their times."""
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    return [re.sub(r"^[\d:.]+ ", "", line)[:300] for line in lines if _WARNING.search(line)]


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
