"""Plain steps several at a time: as many as have to gather anyway before anybody is told of them.

Between two steps that take a few milliseconds each, a step's own bookkeeping is not little. Where all that a step needs
to know is which tokens the one before it drew, a compiled program goes on by itself: no session has hints, a prompt to
read, or asks for more than tokens. It comes back when a session ends, when somebody calls, or when it is time to tell.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from outrider.serving.loop import MessageWatch
from outrider.serving.scheduler import Scheduler
from services.target.sampling.session import TargetSession
from services.target.speculation.planner import Planner
from services.target.step.batch import MultiStep, SessionWork, Texts

_MOST = 16  # steps


def multi_step_of(
    entries: Sequence[TargetSession],
    steps: int,
    files: Sequence[int],
    *,
    narrow: bool = False,
    same: int = 0,
    room: int = 0,
) -> MultiStep:
    """Steps of some sessions; see Burst. same: as of Texts; 0 to go on where texts repeat.

    room: for tokens behind the texts, where they are wanted whether they repeat or not
    """
    stops = [entry.stops for entry in entries]
    counts = array("q", [len(stop) // 8 for stop in stops])
    texts = _texts(entries, room or steps, same) if same or room else None
    return MultiStep(steps, b"".join(stops), counts, array("i", files), narrow, texts=texts)


def _texts(entries: Sequence[TargetSession], room: int, same: int) -> Texts:
    sessions = [entry.session for entry in entries]
    places = array("q", [session.tokens_with_room(room) for session in sessions])
    return Texts(places, array("q", [session.length for session in sessions]), same)


class MultiStepPlanner:
    """Decides for one engine.

    seconds: in which tokens gather; 0 is no bursts
    """

    def __init__(
        self, planner: Planner, scheduler: Scheduler, entries: Mapping[int, TargetSession], seconds: float
    ) -> None:
        """entries: of the sessions that are open, by id."""
        self._planner = planner
        self._scheduler = scheduler
        self._entries = entries
        self.seconds = seconds

    @contextmanager
    def planned(
        self, works: Sequence[SessionWork], listen: MessageWatch, same: int = 0, rounds: MultiStep | None = None
    ) -> Iterator[MultiStep | None]:
        """The steps that may follow one of so many roots at once, with pages for their tokens; None for none.

        listen: how somebody who calls is heard while the context lasts. same: as of `multi_step_of`. rounds: what is to
        follow instead.
        """
        if rounds is not None:
            assert rounds.texts is not None, "rounds know their session's text"
            with listen() as files:
                yield replace(rounds, files=array("i", files), texts=replace(rounds.texts, same=same))
            return
        steps = self._steps(works)
        if steps < 2 or not self._reserve(works, steps):
            yield None
            return
        entries = [self._entries[work.chunk.session.id] for work in works]
        with listen() as files:
            yield multi_step_of(entries, steps, files, same=same)

    def alone(self, works: Sequence[SessionWork]) -> bool:
        """True for sessions that nobody waits beside, and of which nothing but their next tokens is wanted."""
        entries = self._entries
        if not self.seconds or not works or len(works) != len(entries):  # somebody waits for a place, or a grammar
            return False
        if any(len(work.chunk) > 1 or not work.chunk.last or len(work.draft) for work in works):
            return False
        if any(work.chunk.session.length == work.chunk.session.opened_length for work in works):
            return False  # somebody waits for a first token
        return all(entry.plain for entry in entries.values())

    def _steps(self, works: Sequence[SessionWork]) -> int:
        """How many steps take as long as tokens gather, if nothing else is to be done in that time."""
        if not self.alone(works):
            return 0
        keys = sum(work.chunk.stop for work in works)
        seconds, _ = self._planner.budget.cost.step(len(works), keys)
        room = min(self._planner.room(work.chunk.session) for work in works)
        return min(math.ceil(self.seconds / seconds), room, _MOST)

    def _reserve(self, works: Sequence[SessionWork], steps: int) -> bool:
        """Lease pages for tokens that nobody has drawn yet; what is too many is given back when they are known."""
        return all(
            self._scheduler.reserve_spare(work.chunk.session, work.chunk.session.length + steps - 1) for work in works
        )
