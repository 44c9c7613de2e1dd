"""A target's mode policy in virtual time, with a draft behind a network: its answers take given times, and hold what a
random text lets them hold. A thousand steps take some ten milliseconds.

A tree of a commit holds the next tokens up to the first one that its drafter does not foretell; what of it is still
ahead when it arrives is verified, or has been overtaken. So the accept lengths of modes that wait, and of those that do
not, follow from the same text.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.target.speculation.modes.mode import DRAFT_MODES, SpeculationMode
from services.target.speculation.modes.policy import ModePolicy
from tests.support.target.virtual_time.drafter_clock import Clock

_DEPTH = 8  # tokens of a tree's longest path
_SAME = 0.7  # share of tokens that a drafter foretells, or not, from wherever it begins
AHEAD = 0.15  # probability that a tree holds a token behind one that it did not foretell


@dataclass(frozen=True)
class Link:
    """Seconds: of a plain step, from a commit to its answer; share by which draft tokens make a step longer, and by
    which a draft on the same cores does; mean probability that a token is foretold."""

    step: float
    latency: float
    verifying: float = 0.08
    sharing: float = 0.0
    foretold: float = 0.62


class Text:
    """Which tokens a drafter foretells from where, drawn once: the same for all modes. Stretches are easy or hard."""

    def __init__(self, draw: random.Random, foretold: float, length: int) -> None:
        chances, level = [], 0.0
        for _ in range(length + _DEPTH):
            level = 0.9 * level + 0.4 * draw.gauss(0.0, 1.0)
            chances.append(1.0 / (1.0 + math.exp(-level - math.log(foretold / (1.0 - foretold)))))
        self.chances = chances
        self._usual = [draw.random() < chance for chance in chances]
        self._draw = draw.random()

    def depth(self, root: int) -> int:
        """Tokens behind the first `root` ones that a tree of theirs holds."""
        draw, depth = random.Random(f"{self._draw}/{root}"), 0
        for at in range(root, min(root + _DEPTH, len(self.chances))):
            same = draw.random() < _SAME
            if not (self._usual[at] if same else draw.random() < self.chances[at]):
                break
            depth += 1
        return depth

    def promise(self, root: int, length: int) -> float:
        """Draft tokens that what is left of a tree promises at a length."""
        promised, path = 0.0, 1.0
        for chance in self.chances[length : root + _DEPTH]:
            path *= chance
            promised += path
        return promised


def hold(policy: ModePolicy, clock: Clock, arrivals: Sequence[tuple[float, ...]], take: Callable[[], None]) -> float:
    """Let time pass while the next step is held; seconds. arrivals: heap by time; take: merges those that are due."""
    begun = clock.now
    while (remaining := policy.wait.remaining) > 0:
        due = arrivals[0][0] if arrivals else math.inf
        clock.now = min(clock.now + remaining, max(due, clock.now)) + 1e-9
        take()
    return clock.now - begun


class Replay:
    """One target that answers one request after another. modes, held: of each step, and seconds before it."""

    def __init__(self, policy: ModePolicy, clock: Clock, link: Link, seed: int = 0) -> None:
        self.policy, self.link = policy, link
        self._clock, self._seed, self._answers = clock, seed, 0
        self.modes: list[SpeculationMode] = []
        self.held: list[float] = []
        self._arrivals: list[tuple[float, int]] = []
        self._trees: dict[int, int] = {}  # depth of those that have arrived, by root
        self._length = 0
        self._text: Text

    def answer(self, length: int) -> float:
        """Commit a text of `length` tokens. Returns its tokens/s behind the first token."""
        self._answers += 1
        text = Text(random.Random(f"{self._seed}/{self._answers}"), self.link.foretold, length)
        noise, policy, link, clock = random.Random(self._answers), self.policy, self.link, self._clock
        self._arrivals, self._trees, self._length, self._text = [], {}, 1, text
        policy.begin(1)
        clock.now += 3 * link.step
        self._committed(1, 0, 0, link.step, prompts=50)
        start = clock.now
        while self._length < length:
            self.held.append(hold(self.policy, self._clock, self._arrivals, self._take))
            self.modes.append(policy.mode)
            drafted = policy.mode in DRAFT_MODES and bool(self._trees)
            policy.begin(1)
            busy = link.sharing if policy.mode in DRAFT_MODES and self._arrivals else 0.0
            clock.now += link.step * (1 + link.verifying * drafted + busy) * noise.uniform(0.98, 1.04)
            ahead = max(root + depth for root, depth in self._trees.items()) - self._length if drafted else 0
            accepted = min(ahead, length - self._length - 1)
            self._length += 1 + accepted
            grown = drafted and noise.random() < AHEAD
            self._trees = {root: depth for root, depth in self._trees.items() if root + depth >= self._length}
            if grown:
                self._trees[self._length] = text.depth(self._length)
            self._take()
            self._committed(1 + accepted, drafted, accepted, link.latency * noise.uniform(0.9, 1.2))
        policy.wait.closed(self._answers)
        return (length - 1) / (clock.now - start)

    def _committed(self, tokens: int, drafted: int, accepted: int, latency: float, prompts: int = 0) -> None:
        asks = self.policy.mode in DRAFT_MODES
        wanted = [self._answers] if asks or not self.policy.wait.has_drafter else []
        self.policy.end(wanted, 1, tokens, prompts=prompts, drafted=drafted, accepted=accepted)
        if not prompts:
            self._weigh(accepted if drafted else None, tokens)
        if wanted and not self.policy.drafting_paused:
            self.policy.asked({self._answers: self._length}, [self._answers] if self._trees else ())
            heapq.heappush(self._arrivals, (self._clock.now + latency, self._length))

    def _weigh(self, accepted: int | None, tokens: int) -> None:
        """As the controller does."""
        wait = self.policy.wait
        wait.gain.committed(wait.now, {} if accepted is None else {self._answers: accepted}, tokens)
        if wait.remaining:
            promised = [self._text.promise(root, self._length) for root in self._trees]
            wait.weigh({self._answers: max(promised)} if promised else {}, self.policy.pace.seconds)

    def _take(self) -> None:
        """Merge what has arrived."""
        while self._arrivals and self._arrivals[0][0] <= self._clock.now:
            _, root = heapq.heappop(self._arrivals)
            depth = self._text.depth(root)
            if root + depth >= self._length:
                self._trees[root] = depth
            self.policy.received(self._answers, fresh=root >= self._length, length=root)
