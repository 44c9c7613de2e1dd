"""Chains of tokens that the target guesses itself, and verifies in its next step.

A step of few rows takes as long as its weights are read, so one that reads fewer of them takes a part of that time:
those of a narrow copy, or of a head. Guesses are drawn with the session's own randomness,
so that many of them are the model's. They write where the verification writes next: nothing of them stays in the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from outrider.serving.loop import MessageWatch
from outrider.serving.scheduler import Scheduler
from outrider.serving.session import Session
from outrider.speculation.tree import TreeSlice
from services.target.sampling.session import TargetSession
from services.target.speculation.planner import Planner
from services.target.step.batch import MultiStep, SessionWork
from services.target.step.fused_loop import LoopRound

LONGEST = 16  # tokens of a chain
_PARENTS = np.arange(-1, LONGEST, dtype=np.int32)
_DEPTHS = np.arange(1, LONGEST + 1, dtype=np.int32)


class DraftSource(ABC):
    """Drafts for one engine's sessions."""

    def __init__(self, planner: Planner, scheduler: Scheduler, entries: Mapping[int, TargetSession]) -> None:
        """entries: of the sessions that are open, by id."""
        self._planner, self._scheduler, self._entries = planner, scheduler, entries
        self.forget()

    @abstractmethod
    def forget(self) -> None:
        """Begin anew with what texts taught."""

    @abstractmethod
    def observe(self, session_id: int, draft: TreeSlice, path: Sequence[int], *, goes_on: bool) -> None:
        """Take in what became of a chain. path: accepted nodes.

        goes_on: False if its session ended with it, right as it may have been.
        """

    @abstractmethod
    def chains(self, works: Sequence[SessionWork], listen: MessageWatch, beside: int = 0) -> dict[int, TreeSlice]:
        """Chains to verify, by session. works: of sessions that only want their next tokens.

        listen: how somebody who calls is heard meanwhile. beside: rows that the step has of others, such as of prompts
        """

    @abstractmethod
    def rate(self, sessions: int, keys: int) -> float:
        """Tokens a second of each of so many sessions that are drafted for. keys: of all of them together."""

    def pays(self, works: Sequence[SessionWork]) -> bool:
        """False where it is known beforehand that plain steps bring more; where not, they are measured."""
        del works
        return True

    def rounds(self, work: SessionWork, seconds: float) -> MultiStep | None:
        """Chains and their verification in one go, for a session that is alone; None if that cannot be.

        seconds: after which no round begins
        """
        del work, seconds

    def learn(self, session: Session, rounds: Sequence[LoopRound], *, goes_on: bool) -> None:
        """Take in what came of such rounds, before their tokens are the session's.

        goes_on: False if the session ends with the last one.
        """
        del session, rounds, goes_on

    def computed(self, works: Sequence[SessionWork]) -> None:
        """A step of the model is launched, which writes these rows."""
        del works

    def close(self, session_id: int) -> None:
        """A session has ended, and its pages are home."""
        del session_id

    def _most(self, works: Sequence[SessionWork]) -> int:
        """Tokens that a chain for all of them may have; those that allow fewer get the first of them."""
        sessions = [work.chunk.session for work in works]
        depth = min(self._planner.depth(session) for session in sessions)
        return min(LONGEST, depth, max(session.max_draft_tokens for session in sessions))

    def _reserve(self, works: Sequence[SessionWork], tokens: int) -> bool:
        """Lease pages for so many tokens of each. False if they are short; the next commit gives back some."""
        sessions = [work.chunk.session for work in works]
        return all(self._scheduler.reserve_spare(session, session.length + tokens) for session in sessions)


def chain_of(entry: TargetSession, tokens: list[int], chance: float) -> TreeSlice:
    """Drafted tokens, up to one that ends the session or could not be drawn.

    chance: that each is right if those before it are
    """
    count = drawable(entry, tokens)
    scores = np.log(np.float32(chance)) * _DEPTHS[:count]
    return TreeSlice(np.array(tokens[:count], np.uint32), _PARENTS[:count], _DEPTHS[:count], scores)


def drawable(entry: TargetSession, tokens: Sequence[int]) -> int:
    """How many of a chain's tokens to verify: up to one that ends the session or could not be drawn, and its limit."""
    count = 0
    for token in tokens[: entry.session.max_draft_tokens]:
        count += token >= 0
        if token < 0 or token in entry.stop_ids:
            break
    return count
