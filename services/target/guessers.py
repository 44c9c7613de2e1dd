"""Where the tokens of the target's own chains come from: a narrow copy of its weights, or a head behind it.

Both write into slots that the verification writes next, and draw with the session's own randomness.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.paging.prefix import PrefixCache
from outrider.serving.loop import Listen
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from services.target.batch import DrawPlan, Work, build
from services.target.bursts import burst_of
from services.target.drawing import Entry, draw_plan
from services.target.kv_cache import KVCache
from services.target.model.base import Model
from services.target.model.head import Head


@dataclass(frozen=True)
class Guesses:
    """tokens: [n, S], step by step. seconds: that a step took; None where it is no example of others."""

    tokens: NDArray[np.int64]
    seconds: float | None


class Guesser(Protocol):
    """Drafts tokens of sessions that only want their next ones.

    prior: the share of its tokens that are right, and the seconds of its step over those of one of the model, as long
        as nobody knows
    least: tokens that a session must have
    """

    prior: tuple[float, float]
    least: int

    def guess(self, works: Sequence[Work], entries: Sequence[Entry], steps: int, listen: Listen) -> Guesses:
        """Up to so many tokens of each session; less if one of them ends, or somebody calls.

        The page tables hold so many tokens behind the committed ones. listen: how who calls is heard meanwhile.
        """
        ...

    def computed(self, works: Sequence[Work]) -> None:
        """A step of the model is launched, which writes these rows."""
        ...

    def close(self, session_id: int) -> None:
        """A session has given its pages back."""
        ...


class Copy:
    """The model's own weights in fewer bits, which go on from the cache that the model has written."""

    prior, least = (0.8, 0.5), 1

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model, self._cache = model, cache

    @torch.inference_mode()
    def guess(self, works: Sequence[Work], entries: Sequence[Entry], steps: int, listen: Listen) -> Guesses:
        """As of Guesser."""
        started = time.perf_counter()
        with listen() as files:
            burst = burst_of(entries, steps, files, narrow=True)
            batch = build(works, self._model.device, draws=draw_plan(works, entries), burst=burst)
            drawn = self._model.runner.forward(batch, self._cache).tokens
        assert drawn is not None, "a model that drafts draws its tokens"
        tokens = drawn.reshape(-1, len(works))
        return Guesses(tokens, (time.perf_counter() - started) / len(tokens))

    def computed(self, works: Sequence[Work]) -> None:
        """It keeps nothing of its own."""

    def close(self, session_id: int) -> None:
        """It keeps nothing of its own."""


class Follower:
    """A head. Before it drafts it computes the rows that it lacks, from the states that the model has left in a pool.

        rows  0 ......... known | ......... length - 2 |
              written by it     | to be written        |

    How far it knows a session, and which cached pages it has written, it keeps book of here (a `PageObserver`).
    """

    prior, least = (0.5, 0.12), 2

    def __init__(self, model: Model, head: Head, cache: KVCache, prefix: PrefixCache) -> None:
        self._device, self._head, self._cache = model.device, head, cache
        self._page_size = prefix.allocator.page_size
        self._known: dict[int, int] = {}
        self._written: dict[int, bool] = {}  # of the cache's pages: all of its rows are
        if prefix.enabled:
            prefix.observers.append(self)

    @torch.inference_mode()
    def guess(self, works: Sequence[Work], entries: Sequence[Entry], steps: int, listen: Listen) -> Guesses:
        """As of Guesser."""
        started = time.perf_counter()
        lacking = [self._lacking(work.chunk.session) for work in works]
        places = array("q", [work.chunk.session.length for work in works])
        draws = DrawPlan(b"".join(entry.sampling for entry in entries), array("q", [1] * len(works)), places)
        with listen() as files:
            burst = burst_of(entries, steps, files, follows=True)
            batch = build(lacking, self._device, draws=draws, burst=burst, ahead=1)
            tokens = self._head.draft(batch, self._cache).reshape(-1, len(works))
        for work in lacking:
            self._learn(work.chunk)
        usual = len(batch) <= 4 * len(works)
        return Guesses(tokens, (time.perf_counter() - started) / len(tokens) if usual else None)

    def computed(self, works: Sequence[Work]) -> None:
        """What it knew of rows that are written again is no longer true."""
        known = self._known
        for work in works:
            session_id, start = work.chunk.session.id, work.chunk.start
            if known.get(session_id, 0) > start:
                known[session_id] = start

    def close(self, session_id: int) -> None:
        """Forget how far it knew the session."""
        self._known.pop(session_id, None)

    def _lacking(self, session: Session) -> Work:
        """Its rows that are to be written: at least the last one, after which it draws."""
        return Work(Chunk(session, min(self._known.get(session.id, 0), session.length - 2), session.length - 1))

    def _learn(self, chunk: Chunk) -> None:
        session, size = chunk.session, self._page_size
        for index in range(chunk.start // size, min(chunk.stop // size, session.table.shared)):
            self._written[int(session.table.pages[index])] = True
        self._known[session.id] = chunk.stop

    # --- what the prefix cache tells ---

    def page_cached(self, owner: int, index: int, page: int) -> None:
        """The owner's own page, or one of the same tokens that another session has computed."""
        end = (index + 1) * self._page_size
        known = self._known.get(owner, 0)
        if page not in self._written:
            self._written[page] = known >= end
        elif not self._written[page] and known > index * self._page_size:
            self._known[owner] = index * self._page_size

    def page_taken(self, owner: int, index: int, page: int) -> None:
        """A page that the session need not compute, and the head neither if it has written it."""
        start = index * self._page_size
        known = min(self._known.get(owner, 0), start)
        self._known[owner] = start + self._page_size if known == start and self._written.get(page) else known

    def page_dropped(self, page: int) -> None:
        """It will hold other tokens."""
        self._written.pop(page, None)


def guesser_of(model: Model, cache: KVCache, prefix: PrefixCache) -> Guesser | None:
    """The model's, if it has one."""
    if model.head is not None:
        return Follower(model, model.head, cache, prefix)
    return Copy(model, cache) if model.drafts else None
