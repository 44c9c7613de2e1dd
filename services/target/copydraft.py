"""Chains from a narrow copy of the target's weights, which goes on from the cache that the model has written.

How long they are is measured: what a step of the copy takes, what verification takes, and how many tokens were right.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.serving.loop import Listen
from outrider.serving.scheduler import Scheduler
from outrider.speculation.tree import TreeSlice
from services.target.batch import Work, build
from services.target.bursts import burst_of
from services.target.drawing import Entry, draw_plan
from services.target.kv_cache import KVCache
from services.target.model.base import Model
from services.target.planning import Planner
from services.target.selfdraft import LONGEST, SelfDraft, chain_of

_KEPT = 0.97  # what remains of the evidence after a chain
_PRIOR_SHARE = 0.5  # what a step of the copy takes of one of the model, as long as nobody knows
_NEW = 0.2  # weight of the last measurement in that share
_PRIOR_RIGHT, _PRIOR = 6.4, 8.0  # tokens of the copy that count as right before the first, and as tried


class CopyDraft(SelfDraft):
    """Drafts for one engine's sessions."""

    def __init__(
        self, model: Model, cache: KVCache, planner: Planner, scheduler: Scheduler, entries: Mapping[int, Entry]
    ) -> None:
        """entries: of the sessions that are open, by id."""
        super().__init__(planner, scheduler, entries)
        self._model, self._cache = model, cache
        self._shares: dict[int, float] = {}  # of a step of the copy, over one of the model, by their rows

    def forget(self) -> None:
        """Begin anew with what texts taught."""
        self._right = self._tried = 0.0

    @property
    def acceptance(self) -> float:
        """The chance that a token of the copy is the model's, if those before it are."""
        return (self._right + _PRIOR_RIGHT) / (self._tried + _PRIOR)

    def observe(self, session_id: int, draft: TreeSlice, path: Sequence[int], *, goes_on: bool) -> None:
        """As of SelfDraft."""
        del session_id
        self.learn(len(draft), len(path), goes_on=goes_on)

    def learn(self, drafted: int, accepted: int, *, goes_on: bool) -> None:
        """Count a chain's tokens."""
        self._right = self._right * _KEPT + accepted
        self._tried = self._tried * _KEPT + accepted + (goes_on and accepted < drafted)

    def chains(self, works: Sequence[Work], listen: Listen) -> dict[int, TreeSlice]:
        """As of SelfDraft."""
        steps = self._length(len(works), sum(work.chunk.stop for work in works), self._most(works))
        if not self._reserve(works, steps):
            return {}
        tokens = self._draft(works, steps, listen)
        return {
            work.chunk.session.id: chain_of(self._entries[work.chunk.session.id], own, self.acceptance)
            for work, own in zip(works, tokens.T.tolist(), strict=True)
        }

    def rate(self, sessions: int, keys: int) -> float:
        """As of SelfDraft."""
        return float(self._rates(sessions, keys, LONGEST).max())

    def _length(self, sessions: int, keys: int, most: int) -> int:
        """Tokens of the chains that bring most for the time of drafting and verifying them."""
        return int(np.argmax(self._rates(sessions, keys, most))) + 1

    def _rates(self, sessions: int, keys: int, most: int) -> NDArray[np.float64]:
        """Tokens a second of each session, by the length of its chain: 1 to `most`."""
        most = max(1, min(most, self._planner.max_rows - 1))
        lengths = np.arange(1, most + 1)
        chance = self.acceptance
        tokens = np.cumsum(chance**lengths) + 1.0
        cost = self._planner.budget.cost
        step, _ = cost.step(sessions, keys)
        seconds = lengths * step * self._share(sessions) + cost.seconds(sessions * (lengths + 1), keys)
        rates: NDArray[np.float64] = tokens / seconds
        return rates

    def _share(self, rows: int) -> float:
        """What a step of the copy takes of one of the model."""
        known = self._shares.get(rows)
        if known is None:
            nearest = min(self._shares, key=lambda other: abs(other - rows), default=None)
            return _PRIOR_SHARE if nearest is None else self._shares[nearest]
        return known

    def _took(self, works: Sequence[Work], seconds: float) -> None:
        """A step of the copy took so many seconds."""
        plain, _ = self._planner.budget.cost.step(len(works), sum(work.chunk.stop for work in works))
        share = seconds / plain
        known = self._shares.setdefault(len(works), share)
        self._shares[len(works)] = known + _NEW * (min(share, 2.0 * known) - known)

    @torch.inference_mode()
    def _draft(self, works: Sequence[Work], steps: int, listen: Listen) -> NDArray[np.int64]:
        """Up to so many tokens of each session, [n, S]. Less if one of them ends, or somebody calls."""
        entries = [self._entries[work.chunk.session.id] for work in works]
        started = time.perf_counter()
        with listen() as files:
            burst = burst_of(entries, steps, files, narrow=True)
            batch = build(works, self._model.device, draws=draw_plan(works, entries), burst=burst)
            drawn = self._model.runner.forward(batch, self._cache).tokens
        assert drawn is not None, "a model that drafts draws its tokens"
        tokens = drawn.reshape(-1, len(works))
        self._took(works, (time.perf_counter() - started) / len(tokens))
        return tokens
