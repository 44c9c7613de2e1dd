"""How long a draft takes to answer a commit: the network both ways, and the draft itself.

It belongs to draft and link, so that what one session shows holds for the next, in every mode and at every load. On the
target's cores a draft takes longer where the target computes meanwhile, so that answers that a step waits for are
averaged apart.
"""

from __future__ import annotations

from services.target.speculation.estimates.average import Average

_WEIGHT = 0.25  # of the last answer: the first ones of a draft that has just started may be slow
_LONGEST = 1.0  # seconds; what takes longer was a pause of the draft
_MOST = 16  # commits of a session that are remembered: as many steps as an answer may take


class AnswerLatency:
    """Measures one engine's answers; knows sessions by id, and their commits by length.

    count: answers measured
    """

    def __init__(self) -> None:
        self._all, self._held = Average(_WEIGHT), Average(_WEIGHT)
        self._asked: dict[int, dict[int, tuple[float, bool]]] = {}

    @property
    def seconds(self) -> float:
        """Seconds from a commit to its answer, on average; 0 before the first one."""
        return self._all.value

    @property
    def held_seconds(self) -> float:
        """The same where the next step waits for it, as far as is known."""
        return min(self._held.value, self._all.value) if self._held.count else self._all.value

    @property
    def count(self) -> int:
        """As above."""
        return self._all.count

    def asked(self, session_id: int, length: int, now: float, *, held: bool) -> None:
        """A commit asks for draft tokens. length: of the session with it; held: the next step waits for the answer."""
        asked = self._asked.setdefault(session_id, {})
        asked[length] = now, held
        if len(asked) > _MOST:
            del asked[next(iter(asked))]

    def answered(self, session_id: int, length: int, now: float) -> None:
        """An answer has come, whose drafter knew `length` tokens. It may be overtaken by further commits."""
        asked = self._asked.get(session_id)
        if not asked or length not in asked:
            return
        begun, held = asked.pop(length)
        seconds = now - begun
        for earlier in [one for one in asked if one < length]:  # a draft answers the last commit that it knows
            del asked[earlier]
        if seconds < _LONGEST:
            self._all.add(seconds)
            if held:
                self._held.add(seconds)

    def closed(self, session_id: int) -> None:
        """A session has ended."""
        self._asked.pop(session_id, None)
