"""The work of a step: which sessions take part, with which committed tokens, and which hints are verified with them.

Of all sessions' hints those are taken that bring most for the time that their rows cost (budget.py), unless the flags
say how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from outrider.config import TargetConfig
from outrider.serving.scheduler import Chunk, Scheduler
from outrider.serving.session import Session
from outrider.speculation.tree import EMPTY_SLICE, TreeSlice
from services.target.sampling.session import TargetSession
from services.target.speculation.budget import Budget, least_score
from services.target.speculation.draft_stats import DraftStatsRecorder
from services.target.speculation.estimates.calibration import Calibrations
from services.target.step.batch import SessionWork

# Most rows of a session in a step, root included, where no flag says it; which of them pay is for the budget to say.
_ROWS_PER_SESSION = 16
# In the time that hints save for a token, a head on the same cores reads about so many rows: 64 in 3 to 4 ms, while a
# token takes 5 to 7 ms instead of 8 to 11 (the default model on two cores).
_ROWS_A_TOKEN = 40


class Planner:
    """Plans one engine's steps.

    budget: measured by the warm-up; max_rows: of a session in a step, root included
    fixed_tokens_per_session: all draft tokens are verified, whether they pay or not
    """

    def __init__(
        self, config: TargetConfig, scheduler: Scheduler, longest: int, entries: Mapping[int, TargetSession]
    ) -> None:
        """longest: tokens that a session may have; entries: of the sessions that are open, by id."""
        self.budget = Budget()
        self.calibrations = Calibrations()
        self.max_rows = config.fixed_tokens_per_session or _ROWS_PER_SESSION
        self.fixed_tokens_per_session = config.verifies_all_draft_tokens
        self._max_depth = config.speculative_num_steps
        self._max_children = config.speculative_eagle_topk
        self._scheduler = scheduler
        self._longest = longest
        self._entries = entries
        self._least = 0.0  # probability below which no node paid in the last step

    def plan(self, *, hints: bool) -> list[SessionWork]:
        """Work for one step; none if there is nothing to do. hints: may be verified."""
        chunks = self._scheduler.plan()
        rows, keys = sum(map(len, chunks)), sum(chunk.stop for chunk in chunks)
        self._least = self.budget.least_probability(rows, sum(chunk.last for chunk in chunks), keys)
        hints = hints and any(entry.tree for entry in self._entries.values())
        drafts = self._drafts(chunks, rows, keys) if hints else {}
        return [SessionWork(chunk, drafts.get(chunk.session.id, EMPTY_SLICE)) for chunk in chunks]

    def count_misses(self, works: Sequence[SessionWork], record: DraftStatsRecorder, *, unwanted: bool) -> None:
        """Tell the record whose tokens are drawn without a node to verify. unwanted: drafters were told to rest."""
        if not record.begun:
            return
        missing = [work.chunk.session for work in works if work.chunk.last and not work.draft]
        if unwanted:
            record.rested(sum(session.length > session.opened_length for session in missing))
            return
        for session in missing:
            record.missed(session, self._entries[session.id].tree)

    def room(self, session: Session) -> int:
        """Tokens that may still be committed; at least 1."""
        limit = min(session.prompt_length + session.stop.max_tokens, self._longest)
        return limit - session.length

    def depth(self, session: Session) -> int:
        """Draft tokens in a row that a step may accept, at most."""
        depth = self.room(session) - 1  # the bonus token needs a place too
        return depth if self._max_depth is None else min(depth, self._max_depth)

    def wanted(self, entry: TargetSession) -> int:
        """Nodes that the next step could verify with profit, judged by this one: none, one to try, or all."""
        most = min(entry.session.max_draft_tokens, self.max_rows - 1)
        if self.fixed_tokens_per_session or min(self.calibrations[entry.session.id].ratio, 1.0) > self._least:
            return most
        return min(int(self.calibrations[entry.session.id].due), most)

    def tell(self, entry: TargetSession, *, unwanted: bool, unread: bool) -> int:
        """Nodes that drafters hear are wanted for the next step, with a session's commit.

        unwanted: none are, of any session. unread: a head has not read this one, as far as is known. If it heard so far
        that it need not, a few last tokens are not worth its reading now.
        """
        session = entry.session
        late = unread and session.drafting_paused and session.length > _ROWS_A_TOKEN * self.room(session)
        session.drafting_paused = unwanted or late
        return 0 if session.drafting_paused else self.wanted(entry)

    def _drafts(self, chunks: Sequence[Chunk], rows: int, keys: int) -> dict[int, TreeSlice]:
        """The nodes to verify, by session: those that pay in this step, as far as there is room."""
        entries = [self._entries[chunk.session.id] for chunk in chunks if chunk.last]
        drafts = [self._candidates(entry, 0.0 if self.fixed_tokens_per_session else self._least) for entry in entries]
        if not self.fixed_tokens_per_session:
            ratios = [self.calibrations[entry.session.id].ratio for entry in entries]
            counts = self.budget.choose(drafts, ratios, rows, keys)
            drafts = [
                draft.head(max(count, 1) if self.calibrations[entry.session.id].due else count)
                for entry, draft, count in zip(entries, drafts, counts, strict=True)
            ]
        return {
            entry.session.id: self._reserve(entry.session, draft) for entry, draft in zip(entries, drafts, strict=True)
        }

    def _candidates(self, entry: TargetSession, least: float) -> TreeSlice:
        """The likeliest nodes of a session, least: in probability, unless one is due to be tried."""
        depth = self.depth(entry.session)
        most = min(entry.session.max_draft_tokens, self.max_rows - 1)
        if depth < 1 or most < 1:
            return EMPTY_SLICE
        admits = entry.admits if entry.matcher is not None else None
        calibration = self.calibrations[entry.session.id]
        lowest = -math.inf if calibration.due else least_score(least, calibration.ratio)
        return entry.tree.select(most, depth, self._max_children, lowest, admits)

    def _reserve(self, session: Session, draft: TreeSlice) -> TreeSlice:
        """As much of a draft as there are pages for, which it gets."""
        allocator = self._scheduler.allocator
        spare = session.table.capacity - session.length + allocator.free_pages * allocator.page_size
        draft = draft.head(max(spare, 0))
        reserved = self._scheduler.reserve_spare(session, session.length + len(draft))
        assert reserved, "spare pages were counted wrongly"
        return draft
