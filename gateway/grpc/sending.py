"""Sends the messages of a streamed call, to clients that may not read them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gateway.orchestration.generation import Generation
from outrider.errors import DeadlineExceeded


class Sender:
    """Writes messages of one call, as long as its client reads them and its deadline allows."""

    def __init__(self, context: Any, generations: Sequence[Generation], seconds: float) -> None:
        """generations: of the call, whose deadlines count. seconds: that a message may wait; 0 for no limit."""
        self._context = context
        self._generations = generations
        self._seconds = seconds
        self._deadline = min((one.deadline for one in generations if one.deadline is not None), default=None)

    async def send(self, message: Any) -> None:
        """Write a message. Raises DeadlineExceeded if the client does not read it in time."""
        limit = asyncio.get_running_loop().time() + self._seconds if self._seconds > 0.0 else None
        ends = [one for one in (limit, self._deadline) if one is not None]
        try:
            async with asyncio.timeout_at(min(ends, default=None)):
                await self._context.write(message)
        except TimeoutError:
            for generation in self._generations[:1]:
                generation.unread()
            raise DeadlineExceeded("the client did not read its answer in time; read messages as they come") from None
