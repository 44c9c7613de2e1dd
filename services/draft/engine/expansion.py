"""Chooses the nodes that the next round expands, over all sessions, and the drafter that expands them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.tree import ROOT
from services.draft.drafters.base import Drafter, ExpandRequest
from services.draft.engine.session_slots import SessionSlots

# Nodes of a session that one round considers; more than any drafter expands.
_REQUESTS_PER_SESSION = 16
# Each round of waiting raises a session's log-probabilities by this, so that likelier nodes of others cannot starve it.
_WAITING_BONUS = 0.1


class ExpansionScheduler:
    """Ranks the leaves of all sessions. A quick drafter may stand beside the main one; both grow the same trees."""

    def __init__(self, slots: Sequence[SessionSlots]) -> None:
        """slots: of each drafter, the main one's last."""
        self._slots = slots
        self._quick_was_last = False

    def choose(self) -> tuple[list[ExpandRequest], int]:
        """The requests of the next round, and the index of the drafter that may expand them.

        The quick drafter expands new roots first, so that its draft tokens are sent before the main drafter begins.
        Otherwise the drafters alternate.
        """
        main = len(self._slots) - 1
        quick = self.requests(0) if main else []
        if quick and (quick[0].node == ROOT or not self._quick_was_last):
            self._quick_was_last = True
            return quick, 0
        self._quick_was_last = False
        requests = self.requests(main)
        return (requests, main) if requests or not quick else (quick, 0)

    def requests(self, index: int) -> list[ExpandRequest]:
        """The likeliest leaves for a drafter over all sessions, best first; sessions that wait longer get a bonus."""
        ranked: list[tuple[float, int, int, ExpandRequest]] = []
        for session in self._slots[index].held.values():
            if own := session.best_leaves(_REQUESTS_PER_SESSION, index):
                frontier = session.frontiers[index]
                frontier.rounds_waited += 1
                bonus = _WAITING_BONUS * (frontier.rounds_waited - 1)
                waited, first = -frontier.rounds_waited, len(ranked)
                for place, (reach, node) in enumerate(own, first):
                    log_reach = min(reach + bonus, 0.0)
                    ranked.append((-log_reach, waited, place, ExpandRequest(session, node, log_reach)))
        ranked.sort()  # `place` is unique, so requests are never compared
        return [request for *_, request in ranked]


def expand(drafter: Drafter, requests: Sequence[ExpandRequest], index: int) -> int:
    """Expand nodes with a drafter. Returns their number, or the drafter's limit of a step if it expanded none.

    index: of the drafter's frontier in the sessions
    """
    expansions = drafter.expand(requests)
    for expansion in expansions:
        session = expansion.session
        nodes = expansion.tokens, expansion.parents, expansion.log_scores
        if expansion.whole:
            session.grower.add_whole_tree(*nodes, index)
        elif expansion.places:
            drafter.placed(session, session.grower.add_grown(*nodes, expansion.places, index), expansion.places)
        else:
            session.grower.add(expansion.node, *nodes, index)
        session.frontiers[index].rounds_waited = 0
    return len(expansions) or drafter.expansions_per_step
