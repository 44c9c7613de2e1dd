"""A session as the gateway holds it: the truth about its tokens, and a queue to whoever waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.errors import OutriderError
from outrider.serving.messages import OpenSession
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams, StopConditions

if TYPE_CHECKING:
    from gateway.streams.draft import DraftLink
    from gateway.streams.target import TargetLink


@dataclass(frozen=True)
class Committed:
    """New tokens of a session, by one step. finish: RUNNING unless they are the last."""

    tokens: Sequence[int]
    finish: FinishReason


class Session:
    """Prompt, committed tokens, parameters, where it runs, and how speculation went."""

    def __init__(self, session_id: int, prompt: Sequence[int], sampling: SamplingParams, stop: StopConditions) -> None:
        """prompt: token ids, at least one."""
        self.id = session_id
        self.prompt_length = len(prompt)
        self.tokens: list[int] = list(prompt)
        self.sampling = sampling
        self.stop = stop
        self.target: TargetLink | None = None
        self.draft: DraftLink | None = None
        self.steps = 0
        self.verified = 0
        self.accepted = 0
        self.ended = False
        self.opened_at = self.last_commit_at = time.perf_counter()
        self._events: asyncio.Queue[Committed | OutriderError] = asyncio.Queue()

    @property
    def new_tokens(self) -> int:
        """Tokens committed after the prompt."""
        return len(self.tokens) - self.prompt_length

    def request(self) -> OpenSession:
        """What opens it, or opens it again: prompt and committed tokens."""
        tokens = np.array(self.tokens, dtype=np.uint32)
        return OpenSession(self.id, tokens, self.prompt_length, self.sampling, self.stop)

    def commit(self, tokens: Sequence[int], verified: int, accepted: int, finish: FinishReason) -> None:
        """Append what a step committed, and hand it on."""
        self.tokens += tokens
        self.steps += 1
        self.verified += verified
        self.accepted += accepted
        self.ended = finish != FinishReason.RUNNING
        self._events.put_nowait(Committed(tokens, finish))

    def fail(self, error: OutriderError) -> None:
        """End it with an error."""
        self.ended = True
        self._events.put_nowait(error)

    async def next(self) -> Committed:
        """The next commit. Raises the OutriderError that ended the session."""
        event = await self._events.get()
        if isinstance(event, OutriderError):
            raise event
        # What has gathered meanwhile is handed on as one.
        while event.finish == FinishReason.RUNNING and not self._events.empty():
            more = self._events.get_nowait()
            if isinstance(more, OutriderError):
                self._events.put_nowait(more)
                break
            event = Committed([*event.tokens, *more.tokens], more.finish)
        return event
