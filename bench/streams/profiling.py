"""A CPU profile of a process by component, from samples of py-spy."""

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

_SAMPLES_PER_SECOND = 400
_PARTS = (  # path patterns of stack frames and their components; the innermost matching frame counts
    ("uvicorn/", "uvicorn: HTTP and the clients' sockets"),
    ("starlette/", "starlette and fastapi"),
    ("fastapi/", "starlette and fastapi"),
    ("grpc/", "gRPC: Python"),
    ("gateway/api/", "gateway: JSON responses"),
    ("gateway/text/", "gateway: detokenization"),
    ("gateway/grpc/service.py", "gateway: protobuf responses"),
    ("gateway/streams/", "gateway: frames of the services"),
    ("outrider/wire/", "gateway: frames of the services"),
    ("gateway/", "gateway: sessions and metrics"),
    ("threading.py", "gRPC: polling thread"),
    ("asyncio/runners.py", "event loop and gRPC's native code"),
)


def profiler() -> str:
    """The path of py-spy. Raises ConfigError if it is not installed."""
    py_spy = shutil.which("py-spy")
    if py_spy is None:
        raise ConfigError("--profile needs py-spy; pip install py-spy")
    return py_spy


def profiled(pid: int, work: Callable[[], Any]) -> list[dict[str, Any]]:
    """Shares of a process's samples by component during `work`. Raises ConfigError if py-spy is not installed."""
    py_spy = profiler()
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw"
        command = [py_spy, "record", "--rate", str(_SAMPLES_PER_SECOND), "--duration", "3600", "--format", "raw"]
        command += ["--output", str(raw), "--pid", str(pid)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(2)  # py-spy attaches to the process
        work()
        process.send_signal(signal.SIGINT)  # py-spy writes its samples
        process.wait(60)
        return shares(raw.read_text())


def shares(raw: str) -> list[dict[str, Any]]:
    """Shares by component. raw: py-spy's raw format; a line has the frames from outermost to innermost and a count."""
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
