"""How long a draft takes to answer a commit: the network both ways, and the draft itself.

It belongs to draft and link, so that what one session shows holds for the next, in every mode and at every load.
"""

from __future__ import annotations

from services.target.speculation.estimates.average import Average

_LONGEST = 1.0  # seconds; what takes longer was a pause of the draft
_MOST = 16  # commits of a session that are remembered: as many steps as an answer may take


class AnswerLatency:
    """Measures one engine's answers; knows sessions by id, and their commits by length.

    seconds: from a commit to its answer, on average; 0 before the first one
    """

    def __init__(self) -> None:
        self._average = Average()
        self._asked: dict[int, dict[int, float]] = {}

    @property
    def seconds(self) -> float:
        """As above."""
        return self._average.value

    @property
    def count(self) -> int:
        """Answers measured."""
        return self._average.count

    def asked(self, session_id: int, length: int, now: float) -> None:
        """A commit asks for draft tokens. length: of the session with it."""
        asked = self._asked.setdefault(session_id, {})
        asked[length] = now
        if len(asked) > _MOST:
            del asked[next(iter(asked))]

    def answered(self, session_id: int, length: int, now: float) -> None:
        """An answer has come, whose drafter knew `length` tokens. It may be overtaken by further commits."""
        asked = self._asked.get(session_id)
        if not asked or length not in asked:
            return
        seconds = now - asked.pop(length)
        for earlier in [one for one in asked if one < length]:  # a draft answers the last commit that it knows
            del asked[earlier]
        if seconds < _LONGEST:
            self._average.add(seconds)

    def closed(self, session_id: int) -> None:
        """A session has ended."""
        self._asked.pop(session_id, None)
