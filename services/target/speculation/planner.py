"""What a step may hold: committed tokens of the sessions that take part, and room for draft tokens behind them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.config import TargetConfig
from outrider.serving.scheduler import Chunk, Scheduler
from outrider.serving.session import Session
from outrider.speculation.tree import TreeSlice
from services.target.speculation.budget import TOKENS_PER_SESSION, Budget
from services.target.step.batch import SessionWork


class Planner:
    """Limits of one engine's steps.

    budget: measured by the warm-up; max_tokens: of a session in a step, root included
    verifies_all: all draft tokens are verified, whether they are worth their cost or not
    """

    def __init__(self, config: TargetConfig, scheduler: Scheduler, longest: int) -> None:
        """longest: tokens that a session may have."""
        self.budget = Budget()
        self.max_tokens = config.fixed_tokens_per_session or TOKENS_PER_SESSION
        self.verifies_all = config.verifies_all_draft_tokens
        self.max_children = config.speculative_eagle_topk
        self._max_depth = config.speculative_num_steps
        self.scheduler = scheduler
        self._longest = longest

    def plan(self) -> list[SessionWork]:
        """The committed tokens of one step; none if there is nothing to do."""
        return [SessionWork(chunk) for chunk in self.scheduler.plan()]

    def room(self, session: Session) -> int:
        """Tokens that may still be committed; at least 1."""
        limit = min(session.prompt_length + session.stop.max_tokens, self._longest)
        return limit - session.length

    def depth(self, session: Session) -> int:
        """Most draft tokens in a row that a step may accept."""
        depth = self.room(session) - 1  # the bonus token needs a place too
        return depth if self._max_depth is None else min(depth, self._max_depth)

    def last_position(self, session: Session) -> int:
        """The last position that a draft token may have: behind it there is room for the bonus token alone."""
        return session.length + self.room(session) - 2

    @property
    def shapes(self) -> bool:
        """True if flags shape draft trees."""
        return self.verifies_all or self.max_children is not None or self._max_depth is not None

    def most(self, session: Session) -> int:
        """Most draft tokens of a session in a step."""
        return min(session.drafting.max_tokens, self.max_tokens - 1)

    def reserve(self, sessions: Sequence[Session], tokens: int) -> bool:
        """Lease pages for more tokens of each session. False if they are short; the next commit returns the rest."""
        return all(self.scheduler.reserve_spare(session, session.length + tokens) for session in sessions)

    def reserve_room(self, session: Session, tokens: int, draft_tokens: int) -> int:
        """As many draft tokens behind some tokens of a session as there are pages for, which the session leases."""
        allocator = self.scheduler.allocator
        spare = session.table.capacity - tokens + allocator.free_pages * allocator.page_size
        count = min(draft_tokens, max(spare, 0))
        reserved = self.scheduler.reserve_spare(session, tokens + count)
        assert reserved, "spare pages were counted wrongly"
        return count

    def reserve_draft(self, session: Session, draft: TreeSlice) -> TreeSlice:
        """As much of a draft as there are pages for, which the session leases."""
        return draft.head(self.reserve_room(session, session.length, len(draft)))


def last_chunks(works: Sequence[SessionWork]) -> list[Chunk]:
    """The chunks after which tokens are sampled."""
    return [work.chunk for work in works if work.chunk.last]
