"""Where a process spends its processor time, by part: samples of py-spy, summed over who was at work."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

_RATE = 400  # samples a second
_PARTS = (  # what a frame's file says of the part that it belongs to; the innermost that fits counts
    ("uvicorn/", "uvicorn: HTTP and the clients' sockets"),
    ("starlette/", "starlette and fastapi"),
    ("fastapi/", "starlette and fastapi"),
    ("grpc/", "gRPC, its Python part"),
    ("gateway/api/", "gateway: answers as JSON"),
    ("gateway/text/", "gateway: text of tokens"),
    ("gateway/grpc/service.py", "gateway: answers as protobuf messages"),
    ("gateway/streams/", "gateway: frames of the services"),
    ("outrider/wire/", "gateway: frames of the services"),
    ("gateway/", "gateway: sessions, parts and metrics"),
    ("threading.py", "gRPC, its polling thread"),
    ("asyncio/runners.py", "event loop, and gRPC's compiled part"),
)


def profiler() -> str:
    """py-spy's program. Raises ConfigError where it is missing."""
    py_spy = shutil.which("py-spy")
    if py_spy is None:
        raise ConfigError("--profile needs py-spy; pip install py-spy")
    return py_spy


def profiled(pid: int, work: Callable[[], Any]) -> list[dict[str, Any]]:
    """Shares of a process's samples by part while some work is done. Raises ConfigError where py-spy is missing."""
    py_spy = profiler()
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw"
        command = [py_spy, "record", "--rate", str(_RATE), "--duration", "3600", "--format", "raw"]
        command += ["--output", str(raw), "--pid", str(pid)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(2)  # it looks at the process first
        work()
        process.send_signal(signal.SIGINT)  # it writes what it has
        process.wait(60)
        return shares(raw.read_text())


def shares(raw: str) -> list[dict[str, Any]]:
    """Shares by part of stacks as py-spy writes them: frames from the outermost on, a space, how often."""
    parts = Counter[str]()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        parts[_part(stack.split(";"))] += int(count)
    total = sum(parts.values())
    return [{"part": part, "share": f"{count / total:.0%}"} for part, count in parts.most_common()]


def _part(frames: list[str]) -> str:
    for frame in reversed(frames):
        for pattern, part in _PARTS:
            if f"({pattern}" in frame or f"/{pattern}" in frame:
                return part
    return "other"
