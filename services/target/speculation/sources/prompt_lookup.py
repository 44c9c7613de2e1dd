"""Prompt lookup: what followed a session's last tokens when they occurred before in its own text.

Texts quote their prompts and go on as these did, summaries and code above all. A lookup costs next to nothing, so it
pays even where every other source costs more than a plain step. Prompt lookup decoding (Saxena, 2023), with acceptance
rates measured by how many of the last tokens match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.serving.loop import MessageWatch
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.tree import TreeSlice
from services.target.sampling.session import TargetSession
from services.target.speculation.budget import throughput
from services.target.speculation.estimates.acceptance import DECAY, AcceptanceEstimate
from services.target.speculation.planner import Planner
from services.target.speculation.sources.base import MAX_CHAIN, MIN_SPEEDUP, Demand, Drafts, DraftSource, chain_of

MIN_MATCH = 2  # tokens
_MAX_MATCH = 12  # the acceptance rate does not rise with longer matches
_MAX_PLACES = 8  # the latest earlier occurrences that are compared
_FADE = 0.9997  # of all evidence, per step, so that a lookup that did not pay is tried again
_PRIORS = np.linspace(0.5, 0.9, _MAX_MATCH - MIN_MATCH + 1).tolist()  # by match length, from MIN_MATCH on
_LENGTHS = np.arange(1, MAX_CHAIN + 1)  # of chains


def find(tokens: NDArray[np.uint32], most: int) -> tuple[int, NDArray[np.uint32]]:
    """The earlier occurrence of a text's last tokens with the longest match; among equals, the latest.

    tokens: [length]. Returns the match length, 0 if below MIN_MATCH, and up to `most` tokens that followed it.
    """
    length = len(tokens)
    nothing = 0, tokens[length:]
    if length <= MIN_MATCH or most < 1:
        return nothing
    behind = np.flatnonzero(tokens[MIN_MATCH - 1 : -1] == tokens[-1]) + MIN_MATCH  # places behind the same last token
    behind = behind[tokens[behind - MIN_MATCH] == tokens[-MIN_MATCH]][-_MAX_PLACES:]
    if not len(behind):
        return nothing
    matches = [_match(tokens, int(place)) for place in behind]
    best = max(range(len(matches)), key=lambda i: (matches[i], i))
    place = int(behind[best])
    return matches[best], tokens[place : place + most]


def _match(tokens: NDArray[np.uint32], place: int) -> int:
    """How many tokens before a place equal the text's last ones."""
    count = min(place, _MAX_MATCH)
    unequal = np.flatnonzero(tokens[place - count : place] != tokens[len(tokens) - count :])
    return count - 1 - int(unequal[-1]) if len(unequal) else count


class PromptLookup(DraftSource):
    """Lookups in the sessions' own texts.

    min_match: the shortest match that pays at present; 0 if none does
    estimate:  acceptance by match length
    """

    kind = SourceKind.LOOKUP

    def __init__(self, planner: Planner, sessions: Mapping[int, TargetSession]) -> None:
        """As of DraftSource."""
        self.min_match = 0
        self._matches: dict[int, int] = {}  # of the last drafts, by session
        super().__init__(planner, sessions)

    def forget(self) -> None:
        """As of DraftSource."""
        self.estimate = AcceptanceEstimate(_PRIORS, DECAY)

    def rate(self, match: int) -> float:
        """Acceptance rate of a token whose predecessors are accepted, by match length."""
        return self.estimate.rate(match - MIN_MATCH)

    def draft(self, demand: Demand, listen: MessageWatch) -> Drafts:
        """As of DraftSource: chains, where the step is predicted to exceed plain decoding and the model source."""
        del listen
        self.judge(demand)
        found: dict[int, tuple[int, TreeSlice]] = {}
        for work in demand.works if self.min_match else ():
            session = work.chunk.session
            most = min(self._planner.depth(session), self._planner.most(session), MAX_CHAIN)
            match, tokens = find(session.tokens, most)
            if match >= self.min_match and len(tokens):
                chain = chain_of(self._sessions[session.id], tokens.tolist(), self.rate(match))
                found[session.id] = match, chain
        if not found:
            return {}
        chains = [chain for _, chain in found.values()]
        counts, expected = self._planner.budget.select(
            chains, [1.0] * len(chains), demand.tokens, demand.kv_tokens, demand.sessions, held=0.0
        )
        if expected <= self._floor(demand):
            return {}
        kept = {
            session_id: chain.head(count)
            for (session_id, (_, chain)), count in zip(found.items(), counts, strict=True)
            if count and self._planner.reserve([self._sessions[session_id].session], count)
        }
        self._matches |= {session_id: found[session_id][0] for session_id in kept}
        return kept

    def observe(self, session_id: int, draft: TreeSlice, path: Sequence[int], *, goes_on: bool) -> None:
        """As of DraftSource."""
        self.observe_match(self._matches.pop(session_id), len(draft), len(path), goes_on=goes_on)

    def closed(self, session_id: int) -> None:
        """As of DraftSource."""
        self._matches.pop(session_id, None)

    def observe_match(self, match: int, drafted: int, accepted: int, *, goes_on: bool) -> None:
        """Learn from a chain that followed a match of some length. goes_on: as of `observe`."""
        self.estimate.observe(accepted + (goes_on and accepted < drafted), accepted, match - MIN_MATCH)

    def judge(self, demand: Demand) -> None:
        """Decide which matches pay in a step."""
        self.estimate.fade(_FADE)
        rates = np.array(self.estimate.table, np.float64)
        gains: NDArray[np.float64] = np.cumsum(rates[:, None] ** _LENGTHS, axis=1)  # by match and chain length
        cost, sessions = self._planner.budget.cost, demand.sessions
        throughputs = throughput(cost, gains, _LENGTHS, sessions, sessions, demand.kv_tokens)
        paying = np.flatnonzero(throughputs.max(axis=1) > self._floor(demand))
        self.min_match = MIN_MATCH + int(paying[0]) if len(paying) else 0

    def _floor(self, demand: Demand) -> float:
        """Throughput that a step with lookups must exceed, in tokens per second."""
        plain = MIN_SPEEDUP * self._planner.budget.plain_throughput(demand.sessions, demand.kv_tokens)
        return plain if demand.rival is None else max(plain, demand.rival.throughput(demand.sessions, demand.kv_tokens))
