"""How long drafts take to answer a commit, and how often the answer holds draft tokens.

The time is that of the network both ways, and of the draft itself. It belongs to draft and link, so that what one
session shows holds for the next, in every mode and at every load. Sessions may have drafts at different distances: each
has its own measurement from its first answer on, and until then that of all. On the target's cores a draft takes longer
where the target computes meanwhile, so that answers that a step waits for are averaged apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.target.speculation.estimates.average import WEIGHT, Average

PAUSE = 1.0  # seconds; an answer, or a step, that takes longer is no measurement: a process or a client paused


class Answers:
    """Those to one session, or to all of an engine.

    seconds: from a commit to its answer, on average; 0 before the first one
    count: answers measured
    """

    def __init__(self, every: Answers | None = None) -> None:
        """every: those to all sessions, for one"""
        self._all, self._held = Average(WEIGHT), Average(WEIGHT)
        self._every = every
        self._useful = {False: Average(WEIGHT), True: Average(WEIGHT)}  # by whether no draft token was left

    @property
    def seconds(self) -> float:
        """As above."""
        return self._all.value

    @property
    def held_seconds(self) -> float:
        """The same where the next step waits for it, as far as is known.

        Answers that no step waits for are merged after the step under way. So what sessions with steps that waited have
        shown holds for one without, too, until it has been waited for once.
        """
        if self._held.count:
            return min(self._held.value, self._all.value)
        return self._all.value if self._every is None else min(self._every.held_seconds, self._all.value)

    @property
    def count(self) -> int:
        """As above."""
        return self._all.count

    def useful(self, *, bare: bool) -> float:
        """Share of answers that hold draft tokens; 1 before the first one. bare: those to commits that left none."""
        average = self._useful[bare]
        return average.value if average.count else 1.0

    def add(self, seconds: float, *, held: bool, bare: bool, useful: bool) -> None:
        """An answer has come. useful: it holds draft tokens."""
        self._useful[bare].add(float(useful))
        if seconds < PAUSE:
            self._all.add(seconds)
            if held:
                self._held.add(seconds)


class AnswerLatency(Answers):
    """Measures one engine's answers, all together and by session; knows sessions by id, and their commits by length."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[int, dict[int, tuple[float, bool, bool]]] = {}
        self._own: dict[int, Answers] = {}  # of open sessions with an answer

    def of(self, session_id: int) -> Answers:
        """Answers to one session; those to all before it has any."""
        return self._own.get(session_id, self)

    @property
    def links(self) -> Sequence[Answers]:
        """Answers to each open session that has any; those to all sessions if none has."""
        return [*self._own.values()] or [self]

    def asked(self, session_id: int, length: int, now: float, *, held: bool, bare: bool = True) -> None:
        """A commit asks for draft tokens. length: of the session with it; held: the next step waits for the answer.

        bare: no draft token of the session is left
        """
        asked = self._asked.setdefault(session_id, {})
        asked[length] = now, held, bare
        while now - next(iter(asked.values()))[0] > PAUSE:  # its answer would be no measurement
            del asked[next(iter(asked))]

    def answered(self, session_id: int, length: int, now: float, *, useful: bool = True) -> None:
        """An answer has come, whose drafter knew `length` tokens. It may be overtaken by further commits.

        useful: it holds draft tokens
        """
        asked = self._asked.get(session_id)
        if not asked or length not in asked:
            return
        begun, held, bare = asked.pop(length)
        for earlier in [one for one in asked if one < length]:  # a draft answers the last commit that it knows
            del asked[earlier]
        for answers in (self, self._own.setdefault(session_id, Answers(self))):
            answers.add(now - begun, held=held, bare=bare, useful=useful)

    def closed(self, session_id: int) -> None:
        """A session has ended."""
        self._asked.pop(session_id, None)
        self._own.pop(session_id, None)
