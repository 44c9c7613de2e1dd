"""STANDALONE on cores of the target: a draft that computes only while the target waits for it.

After a commit, one program computes the rows of the commit, expands the root, and grows the tree as long as that is
worth its time (programs/rounds.py). All of it is one proposal, so the target waits once. Then the draft rests until the
next commit: what it drafted ahead on the same cores would delay the verification by as much as it saves.

A prompt is read once the target has committed the first token, in chunks, but for its last rows, from which the first
tree grows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from outrider.paging.prefix import PrefixCache
from outrider.speculation.tree import ROOT
from services.draft.drafters.base import ExpandRequest, Expansion
from services.draft.drafters.model import PendingWork
from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.model.programs.runner import ModelRunner
from services.draft.sessions.batch import Rounds, SessionWork, StepShape, Stopping
from services.draft.sessions.session import DraftSession

ROUNDS = Rounds(12)  # at most; the program ends them where the next one is not worth its time
# Pending rows of a session: behind a commit of proposed tokens at most two, the last of them and the bonus token.
_SHAPES = ((1, 2), (1, 8), (4, 2), (16, 2))
_EMA_WEIGHT = 0.2  # of the last round, or commit, in the averages of seconds
_FIRST_PACE = 6.0  # the target's step in levels, before one was measured
# Decay of the evidence per committed token; promised tokens that count as accepted before any evidence; and the lowest
# quality, so that a draft that was always wrong still proposes, and is judged anew.
_DECAY, _PRIOR_TOKENS, _MIN_QUALITY = 0.98, 8.0, 0.2
_MAX_SECONDS = 2.0  # between a proposal and its commit; more is a pause


class Pace:
    """What a level costs, and how long the target takes behind a proposal: averages.

    level: seconds, 0 before one was measured; target: seconds from a proposal to the commit that follows
    """

    def __init__(self) -> None:
        self.level = 0.0
        self.target = 0.0
        self._proposed: dict[int, float] = {}  # by session: when its last round ended

    def add_round(self, sessions: Sequence[int], levels: int, seconds: float, now: float) -> None:
        """A round has ended, of this many levels, the root's included."""
        self.level = _averaged(self.level, seconds / levels)
        self._proposed |= dict.fromkeys(sessions, now)

    def committed(self, session: int, now: float) -> None:
        """A session's commit has arrived."""
        since = self._proposed.pop(session, None)
        if since is not None and now - since < _MAX_SECONDS:
            self.target = _averaged(self.target, now - since)

    def closed(self, session: int) -> None:
        """A session has ended."""
        self._proposed.pop(session, None)

    @property
    def levels(self) -> float:
        """As of Stopping: the time of a round's root and of the target's step, in levels."""
        return 1.0 + (self.target / self.level if self.target and self.level else _FIRST_PACE)


class Quality:
    """Accepted over promised draft tokens of the last commits."""

    def __init__(self) -> None:
        self._promised = self._accepted = _PRIOR_TOKENS

    def add(self, session: DraftSession, count: int, path: Sequence[int]) -> None:
        """Tokens are about to be committed, of which `path` are nodes of the session's tree."""
        tree = session.tree
        for node in (ROOT, *path)[:count]:
            if children := tree.children_of(node):
                self._promised = _DECAY * self._promised + sum(math.exp(tree.log_score[child]) for child in children)
                self._accepted *= _DECAY
        self._accepted += len(path)

    @property
    def logarithm(self) -> float:
        """As of Stopping."""
        return math.log(min(max(self._accepted / self._promised, _MIN_QUALITY), 1.0))


def _averaged(average: float, new: float) -> float:
    return average + (_EMA_WEIGHT if average else 1.0) * (new - average)


class OnDemandDrafter(StandaloneDrafter):
    """Drafts once after each commit.

    pace: times of rounds and of the target; quality: how far the model's probabilities can be trusted
    """

    drafts_ahead = False

    def __init__(self, runner: ModelRunner, prefix: PrefixCache, max_running: int, chunk: int) -> None:
        """As of ModelDrafter."""
        super().__init__(runner, prefix, max_running, chunk)
        self.pace, self.quality = Pace(), Quality()
        largest = next((size for size, _ in _SHAPES if size >= max_running), _SHAPES[-1][0])
        self.set_expansion_shapes([StepShape(size, rows, 1, ROUNDS) for size, rows in _SHAPES if size <= largest])

    def close(self, session: DraftSession) -> None:
        """As of ModelDrafter."""
        self.pace.closed(session.id)
        super().close(session)

    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """As of StandaloneDrafter."""
        self.pace.committed(session.id, time.perf_counter())
        self.quality.add(session, count, path)
        return super().will_commit(session, count, path)

    def expand(self, requests: Sequence[ExpandRequest]) -> list[Expansion]:
        """As of ModelDrafter, timed."""
        start = time.perf_counter()
        expansions = super().expand(requests)
        if grown := [expansion for expansion in expansions if expansion.places]:
            now = time.perf_counter()
            levels = 1 + max(max(expansion.places) + 1 for expansion in grown)
            self.pace.add_round([expansion.session.id for expansion in grown], levels, now - start, now)
        return expansions

    def session_work(self, work: PendingWork, rows: int) -> SessionWork:
        """As of ModelDrafter; a chunk of a prompt leaves a row from which a tree grows."""
        if not self.fits_level(work):
            return SessionWork(work.session, work.prefix_kv, feed=min(work.pending - 1, rows))
        return SessionWork(work.session, work.prefix_kv, feed=work.pending, stopping=self._stopping(work.session))

    def _stopping(self, session: DraftSession) -> Stopping:
        """When the growth of a session's tree ends. A budget below the usual one is spent on the root's children."""
        deepest = min(session.grower.max_depth, session.draft_budget) - 1
        return Stopping(float(min(deepest, ROUNDS.most)), self.pace.levels, self.quality.logarithm)
