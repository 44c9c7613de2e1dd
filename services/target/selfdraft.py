"""Chains of tokens that the target guesses (guessers.py), and verifies in its next step.

A step of few rows takes as long as its weights are read, so one that reads fewer of them takes a part of that time.
Guesses are drawn with the session's own randomness, so that many of them are the model's.

How long chains are is measured: what a guess takes, what verification takes, and how many were right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.serving.loop import Listen
from outrider.serving.scheduler import Scheduler
from outrider.speculation.tree import TreeSlice
from services.target.batch import Work
from services.target.drawing import Entry
from services.target.guessers import Guesser
from services.target.planning import Planner

LONGEST = 16  # tokens of a chain
_KEPT = 0.97  # what remains of the evidence after a chain
_PRIOR = 8.0  # tokens that count as tried before the first
_NEW = 0.2  # weight of the last measurement in that share
_PARENTS = np.arange(-1, LONGEST, dtype=np.int32)
_DEPTHS = np.arange(1, LONGEST + 1, dtype=np.int32)


class SelfDraft:
    """Drafts for one engine's sessions."""

    def __init__(self, guesser: Guesser, planner: Planner, scheduler: Scheduler, entries: Mapping[int, Entry]) -> None:
        """entries: of the sessions that are open, by id."""
        self.guesser = guesser
        self._planner, self._scheduler, self._entries = planner, scheduler, entries
        self._shares: dict[int, float] = {}  # of a guess, over a step of the model, by their rows
        self.forget()

    def forget(self) -> None:
        """Begin anew with what texts taught."""
        self._right = self._tried = 0.0

    @property
    def acceptance(self) -> float:
        """The chance that a guess is the model's token, if those before it are."""
        return (self._right + _PRIOR * self.guesser.prior[0]) / (self._tried + _PRIOR)

    def observe(self, drafted: int, accepted: int, *, goes_on: bool) -> None:
        """Take in what became of a chain. goes_on: False if its session ended with it, right as it may have been."""
        self._right = self._right * _KEPT + accepted
        self._tried = self._tried * _KEPT + accepted + (goes_on and accepted < drafted)

    def chains(self, works: Sequence[Work], listen: Listen) -> dict[int, TreeSlice]:
        """Chains to verify, by session. works: of sessions that only want their next tokens.

        listen: how somebody who calls is heard meanwhile.
        """
        works = [work for work in works if work.chunk.session.length >= self.guesser.least]
        if not works:
            return {}
        sessions = [work.chunk.session for work in works]
        most = min(min(self._planner.depth(session), session.max_draft_tokens) for session in sessions)
        steps = self._length(len(works), sum(work.chunk.stop for work in works), min(most, LONGEST))
        if not all(self._scheduler.reserve_spare(session, session.length + steps) for session in sessions):
            return {}  # pages are short; the next commit gives back what some have got
        tokens = self._draft(works, steps, listen)
        return {
            session.id: chain_of(self._entries[session.id], own, self.acceptance)
            for session, own in zip(sessions, tokens.T.tolist(), strict=True)
        }

    def rate(self, sessions: int, keys: int) -> float:
        """Tokens a second of each of so many sessions that are drafted for. keys: of all of them together."""
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
        known = self._shares.get(rows)
        if known is None:
            nearest = min(self._shares, key=lambda other: abs(other - rows), default=None)
            return self.guesser.prior[1] if nearest is None else self._shares[nearest]
        return known

    def _draft(self, works: Sequence[Work], steps: int, listen: Listen) -> NDArray[np.int64]:
        """Up to so many tokens of each session, [n, S]. Less if one of them ends, or somebody calls."""
        guesses = self.guesser.guess(works, [self._entries[work.chunk.session.id] for work in works], steps, listen)
        if guesses.seconds is not None:
            plain, _ = self._planner.budget.cost.step(len(works), sum(work.chunk.stop for work in works))
            share = guesses.seconds / plain
            known = self._shares.setdefault(len(works), share)
            self._shares[len(works)] = known + _NEW * (min(share, 2.0 * known) - known)
        return guesses.tokens


def chain_of(entry: Entry, tokens: list[int], chance: float) -> TreeSlice:
    """Drafted tokens, up to one that ends the session or could not be drawn.

    chance: that each is right if those before it are
    """
    count = 0
    for token in tokens:
        count += token >= 0
        if token < 0 or token in entry.stop_ids:
            break
    scores = np.log(np.float32(chance)) * _DEPTHS[:count]
    return TreeSlice(np.array(tokens[:count], np.uint32), _PARENTS[:count], _DEPTHS[:count], scores)
