"""The files of a target's tokenizer, which the gateway reads while the target may still load its model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from outrider.wire.v1 import target_pb2

_TIMEOUT = 10.0  # seconds for all files


class TokenizerFiles:
    """Fetched once.

    files: of a target that has loaded its model, by name; empty before
    on_early: called with the files of one that still loads it
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.on_early: Callable[[dict[str, bytes]], None] = lambda _: None
        self._early: dict[str, bytes] = {}

    async def fetch(self, stub: Any) -> None:
        """Fetch the files of a target that has loaded its model, unless they are here."""
        if not self.files:
            self.files = await _files_of(stub)
            self._early = {}

    async def fetch_early(self, stub: Any) -> None:
        """Fetch the files of a target that still loads its model, so that they can be read meanwhile.

        `fetch` fetches them again: another process, with other files, may answer it.
        """
        if self.files or self._early:
            return
        with contextlib.suppress(grpc.aio.AioRpcError):  # it does not know its folder yet, or nothing answers
            self._early = await _files_of(stub)
            self.on_early(self._early)


async def _files_of(stub: Any) -> dict[str, bytes]:
    parts: AsyncIterator[Any] = stub.GetTokenizer(target_pb2.GetTokenizerRequest(), timeout=_TIMEOUT)
    files: dict[str, bytearray] = {}
    async for part in parts:
        files.setdefault(part.file_name, bytearray()).extend(part.content)
    return {name: bytes(content) for name, content in files.items()}
