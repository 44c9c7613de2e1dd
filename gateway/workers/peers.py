"""What the workers of one gateway ask one another: figures, and what a client told only one of them.

Each listens on a socket in a folder of their own. A question is a line of JSON, the answer all that follows. Who does
not answer in time, as it is being started again, is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

log = logging.getLogger(__name__)

_SECONDS = 2.0  # for an answer
_PAUSE = 0.05  # seconds until it is tried again to be alone
_LONGEST = 1 << 20  # bytes of a question

Answers = Mapping[str, Callable[[Any], Any]]


class Peers:
    """The place of a worker among others; of a gateway in one process, which has none, by default."""

    def __init__(self, index: int = 0, count: int = 1, folder: Path | None = None) -> None:
        """folder: private to the workers; needed if they are several."""
        self.index = index
        self.count = count
        self._folder = folder
        self._server: asyncio.Server | None = None

    @property
    def several(self) -> bool:
        """True if there are other workers."""
        return self.count > 1

    @property
    def opened(self) -> bool:
        """True once some worker serves: those that start later share the ports only when they can serve, too."""
        return self._folder is not None and open_mark(self._folder).exists()

    async def serve(self, answers: Answers) -> None:
        """Answer the others. answers: by question; they are called with its content, and give what JSON can say."""
        if self._folder is not None:
            path = _socket(self._folder, self.index)
            path.unlink(missing_ok=True)  # of an earlier life

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                with contextlib.closing(writer), contextlib.suppress(OSError):
                    question, content = orjson.loads(await reader.readline())
                    if question in answers:
                        writer.write(orjson.dumps(answers[question](content)))
                        await writer.drain()

            self._server = await asyncio.start_unix_server(answer, path, limit=_LONGEST)

    async def ask(self, question: str, content: Any = None) -> dict[int, Any]:
        """What the others answer, by their index."""
        others = [index for index in range(self.count) if index != self.index]
        answers = await asyncio.gather(*(self._ask(index, question, content) for index in others))
        return {index: answer[0] for index, answer in zip(others, answers, strict=True) if answer}

    @contextlib.asynccontextmanager
    async def alone(self, what: str) -> AsyncIterator[None]:
        """While no other worker does a thing of this name. One that dies meanwhile is waited for no longer."""
        if self._folder is None:
            yield
            return
        with (self._folder / f"{what}.lock").open("w") as mark:
            while True:
                try:
                    fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    await asyncio.sleep(_PAUSE)
                else:
                    break
            yield

    async def stop(self) -> None:
        """Answer no longer."""
        if self._server is not None:
            self._server.close()

    async def _ask(self, index: int, question: str, content: Any) -> tuple[Any, ...]:
        """The answer, or nothing."""
        assert self._folder is not None, "workers have a folder"
        try:
            async with asyncio.timeout(_SECONDS):
                reader, writer = await asyncio.open_unix_connection(_socket(self._folder, index))
                try:
                    writer.write(orjson.dumps([question, content]) + b"\n")
                    return (orjson.loads(await reader.read()),)
                finally:
                    writer.close()
        except (OSError, TimeoutError, orjson.JSONDecodeError) as error:
            log.info("worker %d gave no answer to %s: %s", index, question, error or "too late")
            return ()


def open_mark(folder: Path) -> Path:
    """The file that is there once some worker serves."""
    return folder / "open"


def health_address(folder: Path, index: int) -> str:
    """Where a worker's own health is asked."""
    return f"unix:{folder}/{index}.health"


def _socket(folder: Path, index: int) -> Path:
    return folder / f"{index}.sock"
