"""Several sessions of one target in virtual time, each with a draft at a distance of its own.

As in link_replay.py, trees hold what a random text lets them hold. Each session answers one request after another. Some
drafts answer a share of the commits with nothing, in runs, as a table of n-grams does.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.target.speculation.modes.mode import DRAFT_MODES, SpeculationMode
from services.target.speculation.modes.policy import ModePolicy
from tests.support.target.virtual_time.drafter_clock import Clock
from tests.support.target.virtual_time.link_replay import AHEAD, Link, Text, hold

_EACH = 0.02  # share by which each further session makes a step longer
_LENGTH = 400  # tokens of an answer
_RUN = 12.0  # tokens that a stretch of empty answers lasts, on average


@dataclass
class _Member:
    """A session, and what of it is under way. trees: depth of those that have arrived, by root."""

    id: int
    link: Link
    text: Text
    draw: random.Random
    empty: float
    length: int = 1
    trees: dict[int, int] = field(default_factory=dict)
    is_empty: bool = False
    tokens: int = 0  # committed in all

    def depth(self, root: int) -> int:
        """Of the tree that the draft makes at a length; -1 for an empty one. One of depth 0 has wrong tokens alone."""
        if self.draw.random() < 1.0 / _RUN:
            self.is_empty = self.draw.random() < self.empty
        return -1 if self.is_empty else self.text.depth(root)


class Crowd:
    """One target with a session for each link. held: seconds of waiting before each step; modes: of each"""

    def __init__(
        self, policy: ModePolicy, clock: Clock, links: Sequence[Link], seed: int = 0, empty: float = 0.0
    ) -> None:
        """links: all with the same step. empty: share of answers that hold nothing"""
        self.policy, self._clock, self._seed, self._empty = policy, clock, seed, empty
        self._noise, self._step = random.Random(seed), links[0].step
        self._arrivals: list[tuple[float, int, int, int]] = []
        self._opened = 0
        self._closed_tokens = [0] * len(links)
        self._members = [self._opening(link) for link in links]
        self.held: list[float] = []
        self.modes: list[SpeculationMode] = []

    def _opening(self, link: Link) -> _Member:
        self._opened += 1
        draw = random.Random(f"{self._seed}/{self._opened}")
        return _Member(self._opened, link, Text(draw, link.foretold, _LENGTH), draw, self._empty)

    def run(self, seconds: float) -> float:
        """Steps for as long. Returns tokens/s."""
        begun, before = self._clock.now, sum(self.tokens)
        while self._clock.now < begun + seconds:
            self.held.append(hold(self.policy, self._clock, self._arrivals, self._take))
            self._advance()
        return (sum(self.tokens) - before) / (self._clock.now - begun)

    @property
    def tokens(self) -> list[int]:
        """Committed with each link."""
        return [done + member.tokens for done, member in zip(self._closed_tokens, self._members, strict=True)]

    def _advance(self) -> None:
        policy, clock, members = self.policy, self._clock, self._members
        self.modes.append(policy.mode)
        drafting, count = policy.mode in DRAFT_MODES, len(members)
        drafted = {one.id for one in members if drafting and one.trees}
        new = [one for one in members if one.length == 1]
        policy.begin(count)
        longer = members[0].link.verifying * len(drafted) / count + _EACH * (count - 1) + 0.3 * len(new)
        longer += members[0].link.sharing * bool(drafting and self._arrivals)
        clock.now += self._step * (1 + longer) * self._noise.uniform(0.98, 1.04)
        accepted = {one.id: self._commit(one, one.id in drafted) for one in members}
        self._take()
        self._settle(drafted, accepted, 50 * len(new))
        for place, one in enumerate(members):
            if one.length >= _LENGTH:
                policy.wait.closed(one.id)
                self._closed_tokens[place] += one.tokens
                members[place] = self._opening(one.link)

    def _commit(self, one: _Member, drafted: bool) -> int:
        ahead = max(root + depth for root, depth in one.trees.items()) - one.length if drafted else 0
        accepted = max(min(ahead, _LENGTH - one.length - 1), 0)
        one.length += 1 + accepted
        one.tokens += 1 + accepted
        one.trees = {root: depth for root, depth in one.trees.items() if root + depth >= one.length}
        if drafted and self._noise.random() < AHEAD and (depth := one.depth(one.length)) >= 0:
            one.trees[one.length] = depth
        return accepted

    def _settle(self, drafted: set[int], accepted: dict[int, int], prompts: int) -> None:
        policy, count = self.policy, len(accepted)
        asks = policy.mode in DRAFT_MODES or not policy.wait.has_drafter
        wanted = list(accepted) if asks else []
        tokens = count + sum(accepted.values())
        policy.end(
            wanted, count, tokens, prompts=prompts, drafted=len(drafted),
            accepted=sum(accepted[one] for one in drafted),
        )  # fmt: skip
        asked = {one.id: one.length for one in self._members if one.id in wanted}
        if not policy.drafting_paused:
            for one in self._members if wanted else ():
                arrival = self._clock.now + one.link.latency * self._noise.uniform(0.9, 1.2)
                heapq.heappush(self._arrivals, (arrival, one.id, one.length, one.depth(one.length)))
        if not prompts and wanted:
            self._weigh({one: accepted[one] for one in drafted}, tokens)
        if not policy.drafting_paused:
            policy.asked(asked, [one.id for one in self._members if one.trees])

    def _weigh(self, accepted: dict[int, int], tokens: int) -> None:
        """As the controller does."""
        wait = self.policy.wait
        wait.gain.committed(wait.now, accepted, tokens)
        if wait.remaining:
            wait.weigh(
                {
                    one.id: max(one.text.promise(root, one.length) for root in one.trees)
                    for one in self._members
                    if one.trees
                },
                self.policy.pace.seconds,
            )

    def _take(self) -> None:
        """Merge what has arrived."""
        members = {one.id: one for one in self._members}
        while self._arrivals and self._arrivals[0][0] <= self._clock.now:
            _, session_id, root, depth = heapq.heappop(self._arrivals)
            if (one := members.get(session_id)) is None:
                continue
            if depth >= 0 and root + depth >= one.length:
                one.trees[root] = depth
            self.policy.received(session_id, fresh=root >= one.length, length=root, useful=depth >= 0)
