"""Draft sources without an engine: a planner with a cost model, and sessions with pages."""

from types import SimpleNamespace

from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from services.target.speculation.budget import Budget
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.sources.base import Demand
from services.target.step.batch import SessionWork
from tests.support.target.driving import opening


def planner_of(cost, room=1000):
    """A planner without limits but those of the sessions' length. cost: seconds of a step by its tokens."""
    return SimpleNamespace(
        budget=Budget(StepCost(cost)),
        max_tokens=64,
        verifies_all=False,
        max_children=None,
        scheduler=SimpleNamespace(limits=SimpleNamespace(step_tokens=512)),
        room=lambda session: room,
        depth=lambda session: room - 1,
        most=lambda session: min(session.drafting.max_tokens, 63),
        reserve=lambda sessions, tokens: True,
    )


def open_sessions(*texts):
    """Sessions that have read these tokens, as draft sources know them, by id."""
    prefix = PrefixCache(PageAllocator(256, 16))
    return {
        number: SimpleNamespace(
            session=Session(opening(number, text), prefix), stops=b"", stop_ids=frozenset(), tree=[], matcher=None
        )
        for number, text in enumerate(texts, 1)
    }


def demand_of(sessions):
    """A step that draft tokens are wanted for, for all these sessions."""
    works = [work_of(entry.session) for entry in sessions.values()]
    return Demand(works, len(works), len(works), sum(work.chunk.stop for work in works))


def work_of(session):
    """A session's part in a step: its last token."""
    return SessionWork(Chunk(session, session.length - 1, session.length))
