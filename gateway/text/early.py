"""The tokenizer of a target that still loads its model: built meanwhile, because a large one takes most of a second."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gateway.text.tokenizer import ModelTokenizer


class EarlyTokenizer:
    """Builds a tokenizer, in a thread, from files that may be used later."""

    def __init__(self) -> None:
        self._files: Mapping[str, bytes] = {}
        self._built: asyncio.Task[ModelTokenizer] | None = None

    def begin(self, files: Mapping[str, bytes]) -> None:
        """Build a tokenizer of these files. Only the first ones are built."""
        if self._built is None and files:
            self._files = files
            self._built = asyncio.create_task(asyncio.to_thread(ModelTokenizer, files))
            self._built.add_done_callback(lambda built: built.cancelled() or built.exception())  # it may stay unused

    async def of(self, files: Mapping[str, bytes]) -> ModelTokenizer:
        """The tokenizer of these files: the one begun with equal ones, or else a new one. Raises ConfigError."""
        built, self._built = self._built, None
        if built is not None and files == self._files:
            return await built
        return ModelTokenizer(files)
