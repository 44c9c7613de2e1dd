"""Starts `outrider serve` for a trainer, as a child that ends with it."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
from collections import deque
from collections.abc import Mapping
from typing import Any

from outrider.integrations.rollouts import RolloutError, RolloutGateway
from outrider.process.parent_death import tied_to_parent
from outrider.process.ports import free_ports, host_and_port

_POLL_SECONDS = 0.5
_LAST_LINES = 30  # of its output, for an error
_LAST_SECONDS = 5.0  # to read them


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Flags of a command line: {"tp_size": 2, "online": True} as --tp-size 2 --online. False and None are left out."""
    words = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]
    return words


class LaunchedGateway:
    """A child process that serves a model. url, key: of its gateway, and of an administrator."""

    def __init__(self, command: str, host: str, flags: Mapping[str, Any]) -> None:
        """command: `outrider serve`, or its path in another environment."""
        port, grpc_port = free_ports(host, 2)
        self.url = f"http://{host_and_port(host, port)}"
        self.key = secrets.token_urlsafe(32)
        own = {"host": host, "port": port, "grpc_port": grpc_port}
        self._command = [*shlex.split(command), *flags_of({**flags, **own})]
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, seconds: float, environment: Mapping[str, str]) -> None:
        """Start it and wait until it is healthy. Raises RolloutError with its last output if it does not become so."""
        self._process = await asyncio.create_subprocess_exec(
            *tied_to_parent(self._command),
            env={**os.environ, **environment, "OUTRIDER_ADMIN_API_KEY": self.key},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._reading = asyncio.create_task(self._read(self._process))
        try:
            async with asyncio.timeout(seconds), RolloutGateway(self.url, self.key) as gateway:
                while not await _healthy(gateway):
                    if self._process.returncode is not None:
                        await self.stop()
                        raise RolloutError(self._failure(f"ended with code {self._process.returncode}"))
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            await self.stop()
            raise RolloutError(self._failure(f"was not healthy after {seconds:.0f} s")) from None

    async def stop(self) -> None:
        """End it, and read what it still wrote."""
        if self._process is None or self._reading is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
        await asyncio.wait([self._reading], timeout=_LAST_SECONDS)  # a process that it started may hold the pipe

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # it is longer than the reader's limit, and dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            print(text, flush=True)  # noqa: T201  # where the trainer's log is

    def _failure(self, what: str) -> str:
        return "\n".join([f"`{shlex.join(self._command)}` {what}; its last output:", *self._lines])


async def _healthy(gateway: RolloutGateway) -> bool:
    try:
        await gateway.get("/health")
    except RolloutError:
        return False
    return True
