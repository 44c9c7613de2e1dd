"""How many tokens of each prompt a step computes.

Callers share a step's tokens for prompts evenly; what one does not need goes to the others. Of a caller's share, the
prompt that has waited longest gets at least half; the rest goes to the shortest prompts. So a long prompt does not
delay short ones, and they do not starve it. Of several sessions with the same next page, one computes it and the others
take it one step later.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from outrider.config import SchedulePolicy
from outrider.serving.session import Session

_SCORED_PARTS = 4  # a step with log-probabilities of prompts takes several times as long as others; see _few_scored


@dataclass(frozen=True)
class Limits:
    """Limits of a step, and of the queue of waiting sessions.

    max_running: sessions in a step. step_tokens: committed tokens computed in a step, over all sessions; None computes
    every prompt in one step. prefill_tokens: prompt tokens among them; a whole prompt may be longer if it is alone.
    max_queued: waiting sessions; None for no limit. scored_tokens: prompt tokens with log-probabilities, whose logits
    take much memory.
    """

    max_running: int
    step_tokens: int | None
    prefill_tokens: int | None = None
    max_queued: int | None = None
    policy: SchedulePolicy = "fcfs"
    scored_tokens: int | None = None


class Portions:
    """Divides a step's tokens among prompts."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def of(self, prompts: Sequence[Session], decoding: int) -> Iterator[tuple[Session, int]]:
        """Tokens of each prompt in this step. prompts: in order of admission. decoding: tokens of other sessions."""
        return self._few_scored(self._of_step(prompts, decoding), decoding)

    def _of_step(self, prompts: Sequence[Session], decoding: int) -> list[tuple[Session, int]]:
        callers = sorted(_by_caller(prompts), key=_pending)
        order = _first_of_each_page([session for sessions in callers for session in _oldest_then_shortest(sessions)])
        if self._limits.step_tokens is None:
            return self._whole(sorted(order, key=lambda session: session is not prompts[0]))
        room = self._limits.step_tokens - decoding
        if self._limits.prefill_tokens is not None:
            room = min(room, self._limits.prefill_tokens)
        portions: list[tuple[Session, int]] = []
        callers = sorted(_by_caller(order), key=_pending)  # so that what one does not need is left to the next
        for i, sessions in enumerate(callers):
            taken = _shared(sessions, -(-room // (len(callers) - i)))
            portions += taken
            room -= sum(size for _, size in taken)
        return portions

    def _few_scored(self, portions: Sequence[tuple[Session, int]], decoding: int) -> Iterator[tuple[Session, int]]:
        """Limit the portions of prompts with log-probabilities, more so while other sessions decode."""
        room = self._limits.scored_tokens
        if room is None:
            yield from portions
            return
        scored = {session.caller for session, _ in portions if not session.scores.complete}
        share = max(1, room // (max(1, len(scored)) * (_SCORED_PARTS if decoding else 1)))
        left = dict.fromkeys(scored, share)
        for session, size in portions:
            if session.scores.complete:
                yield session, size
            elif left[session.caller] > 0:
                yield session, min(size, left[session.caller])
                left[session.caller] -= min(size, left[session.caller])

    def _whole(self, order: Sequence[Session]) -> list[tuple[Session, int]]:
        """As many whole prompts as fit, but at least the first."""
        room = self._limits.prefill_tokens
        portions: list[tuple[Session, int]] = []
        for session in order:
            if room is not None:
                if portions and session.pending > room:
                    break
                room -= session.pending
            portions.append((session, session.pending))
        return portions


def _by_caller(sessions: Sequence[Session]) -> list[list[Session]]:
    """The sessions of each caller, in the given order."""
    found: dict[str, list[Session]] = {}
    for session in sessions:
        found.setdefault(session.caller, []).append(session)
    return list(found.values())


def _pending(sessions: Sequence[Session]) -> int:
    return sum(session.pending for session in sessions)


def _oldest_then_shortest(sessions: Sequence[Session]) -> list[Session]:
    oldest, *others = sessions
    return [oldest, *sorted(others, key=lambda session: session.pending)]


def _shared(sessions: Sequence[Session], room: int) -> list[tuple[Session, int]]:
    """Portions of one caller's prompts: at least half of the room for the first one."""
    rest = _pending(sessions[1:])
    portions: list[tuple[Session, int]] = []
    for session in sessions:
        size = min(session.pending, room if portions else max((room + 1) // 2, room - rest))
        if size <= 0:
            break
        portions.append((session, size))
        room -= size
    return portions


def _first_of_each_page(order: Sequence[Session]) -> list[Session]:
    """Sessions in this order, without those whose next page an earlier one computes in this step."""
    keys: set[Hashable] = set()
    first: list[Session] = []
    for session in order:
        own = session.table.next_key(session.tokens)
        aligned = session.computed == session.table.shared * session.table.page_size
        takes = aligned and session.table.next_key(session.sharable) is not None
        if not (takes and own in keys):
            first.append(session)
            if own is not None:
                keys.add(own)
    return first
