"""Requests between the workers of one gateway: metrics, and calls that a client made on one of them.

Each worker listens on a Unix socket in a shared private folder. A request is a line of JSON, the answer is the rest of
the stream. A worker that does not answer in time, for instance while it restarts, is omitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson

log = logging.getLogger(__name__)

_SECONDS = 2.0  # for an answer
_LOCK_POLL = 0.05  # seconds between attempts to take a lock
_MAX_REQUEST = 1 << 20  # bytes

Answers = Mapping[str, Callable[[Any], Any]]


class Peers:
    """The other workers; by default none, for a gateway in one process."""

    def __init__(self, index: int = 0, count: int = 1, folder: Path | None = None) -> None:
        """index: of this worker. folder: private to the workers; needed if count > 1."""
        self.index = index
        self.count = count
        self._folder = folder
        self._server: asyncio.Server | None = None
        self._answers: dict[str, Callable[[Any], Any]] = {}
        self._held: set[str] = set()  # names of locks, without other workers

    @property
    def several(self) -> bool:
        """True if there are other workers."""
        return self.count > 1

    @property
    def opened(self) -> bool:
        """True once any worker serves. Workers that start later listen only when they can serve as well."""
        return self._folder is not None and open_mark(self._folder).exists()

    def takes_hangups(self) -> None:
        """This worker handles SIGHUP from now on, and reads its files after this."""
        if self._folder is not None:
            hangup_mark(self._folder, self.index).write_text(str(os.getpid()))

    async def serve(self, answers: Answers) -> None:
        """Answer the other workers, these requests too. answers: handlers by request name; they take its content and
        return JSON values.
        """
        self._answers.update(answers)
        if self._folder is not None and self._server is None:
            path = _socket(self._folder, self.index)
            path.unlink(missing_ok=True)  # of an earlier process

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                with contextlib.closing(writer), contextlib.suppress(OSError):
                    question, content = orjson.loads(await reader.readline())
                    if question in self._answers:
                        writer.write(orjson.dumps(self._answers[question](content)))
                        await writer.drain()

            self._server = await asyncio.start_unix_server(answer, path, limit=_MAX_REQUEST)

    def withdraw(self, prefix: str = "") -> None:
        """Answer no requests with this beginning any more."""
        for question in [one for one in self._answers if one.startswith(prefix)]:
            del self._answers[question]

    async def ask(self, question: str, content: Any = None) -> dict[int, Any]:
        """The other workers' answers, by index."""
        others = [index for index in range(self.count) if index != self.index]
        answers = await asyncio.gather(*(self._ask(index, question, content) for index in others))
        return {index: answer[0] for index, answer in zip(others, answers, strict=True) if answer}

    @contextlib.asynccontextmanager
    async def lock(self, name: str) -> AsyncIterator[None]:
        """Hold a lock shared by all workers, which a worker releases when it dies."""
        if self._folder is None:
            yield
            return
        with (self._folder / f"{name}.lock").open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    await asyncio.sleep(_LOCK_POLL)
                else:
                    break
            yield

    @contextlib.contextmanager
    def try_lock(self, name: str) -> Iterator[bool]:
        """Hold a lock shared by all workers, if none of them holds it: False otherwise."""
        if self._folder is None:
            free = name not in self._held
            self._held.add(name)
            try:
                yield free
            finally:
                if free:
                    self._held.discard(name)
            return
        with (self._folder / f"{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def of_model(self, name: str) -> Peers:
        """The same workers, with requests and locks of one model. name: empty for the only model."""
        return _PeersOfModel(self, name, self._folder) if name else self

    async def stop(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.close()

    async def _ask(self, index: int, question: str, content: Any) -> tuple[Any, ...]:
        """The answer as a tuple of one; empty if there is none."""
        assert self._folder is not None, "workers have a folder"
        try:
            async with asyncio.timeout(_SECONDS):
                reader, writer = await asyncio.open_unix_connection(_socket(self._folder, index))
                try:
                    writer.write(orjson.dumps([question, content]) + b"\n")
                    return (orjson.loads(await reader.read()),)
                finally:
                    writer.close()
        except FileNotFoundError:  # it has not started yet
            return ()
        except (OSError, TimeoutError, orjson.JSONDecodeError) as error:
            log.info("worker %d gave no answer to %s: %s", index, question, error or "too late")
            return ()


class _PeersOfModel(Peers):
    """Requests and locks of one model, whose names begin with the model's."""

    def __init__(self, peers: Peers, model: str, folder: Path | None) -> None:
        super().__init__(peers.index, peers.count, folder)
        self._peers = peers
        self._prefix = quote(model, safe="") + ":"

    async def serve(self, answers: Answers) -> None:
        """As in Peers."""
        await self._peers.serve({self._prefix + question: answer for question, answer in answers.items()})

    def withdraw(self, prefix: str = "") -> None:
        """As in Peers, of this model's requests."""
        self._peers.withdraw(self._prefix + prefix)

    async def ask(self, question: str, content: Any = None) -> dict[int, Any]:
        """As in Peers."""
        return await self._peers.ask(self._prefix + question, content)

    @contextlib.asynccontextmanager
    async def lock(self, name: str) -> AsyncIterator[None]:
        """As in Peers."""
        async with super().lock(self._prefix + name):
            yield

    @contextlib.contextmanager
    def try_lock(self, name: str) -> Iterator[bool]:
        """As in Peers."""
        with super().try_lock(self._prefix + name) as free:
            yield free


def open_mark(folder: Path) -> Path:
    """The file that exists once any worker serves."""
    return folder / "open"


def hangup_mark(folder: Path, index: int) -> Path:
    """The file with the id of a worker's process, once that handles SIGHUP."""
    return folder / f"{index}.hangup"


def health_address(folder: Path, index: int) -> str:
    """Address of a worker's own health service."""
    return f"unix:{folder}/{index}.health"


def _socket(folder: Path, index: int) -> Path:
    return folder / f"{index}.sock"
