"""A head and a recorded target in virtual time: no figure depends on the machine.

The draft engine and its head are real, and compute; the clock moves by given times instead: of a target's step, of a
draft's program, and of the network. The target walks along a recorded text, and sends the hidden states of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bench.ahead.control import Mode
from bench.ahead.recorded import Recording
from outrider.config import DraftConfig
from outrider.serving.features import FeatureBlock
from outrider.speculation.proposal import Commit, FinishReason, Proposal
from outrider.speculation.tree import ROOT, SpeculationTree, TreeSlice
from services.draft.engine.engine import DraftEngine
from services.draft.sessions.session import DraftSession
from services.target.speculation.budget import promised
from services.target.speculation.draft_wait import longest_wait
from services.target.speculation.estimates.wait_gain import WaitGain

_MOST = 15  # draft tokens of a step


def head_engine(config: DraftConfig) -> DraftEngine:
    """A draft engine for one session, whose head always grows the first levels of a tree in one program."""
    from services.draft.drafters.feature import FeatureDrafter
    from services.draft.process.app import build

    engine, _ = build(replace(config, max_running_requests=1, disable_radix_cache=True))
    drafter = engine.drafter
    assert isinstance(drafter, FeatureDrafter)
    vars(drafter)["_level_cost"] = lambda shape, _: float(shape.tree is None)  # whatever this machine measures
    drafter.warm_up()
    return engine


def run_virtually(engine: DraftEngine, recordings: Sequence[Recording], times: Times, mode: Mode) -> Totals:
    """All answers one after another, in one mode."""
    drafter: Any = engine.drafter
    ahead, correct = drafter.drafts_ahead, drafter.features_changed

    def features_changed(session: DraftSession) -> None:
        if mode is not Mode.OWN or not session.root_expanded:
            correct(session)

    drafter.drafts_ahead, drafter.features_changed = mode is not Mode.WAITING, features_changed
    draft = VirtualDraft(engine, times)
    target = VirtualTarget(draft, times, mode, _MOST)
    try:
        for recording in recordings:
            target.answer(recording)
    finally:
        draft.close()
        drafter.drafts_ahead, drafter.features_changed = ahead, correct
    return target.totals


class Times(NamedTuple):
    """Seconds: of the target's step, one way of the network, a program of the draft that grows a tree, and a level."""

    step: float
    delay: float
    tree: float
    level: float


@dataclass
class Totals:
    """Of all answers behind their first tokens. drafted: steps with draft tokens; held: seconds of waiting."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    held: float = 0.0
    seconds: float = 0.0


class Wire:
    """Messages under way, by the time of their arrival."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Any]] = []
        self._sent = 0

    def send(self, arrival: float, message: Any) -> None:
        """Add a message."""
        self._sent += 1
        heapq.heappush(self._queue, (arrival, self._sent, message))

    @property
    def next(self) -> float:
        """When the next message arrives; infinity for none."""
        return self._queue[0][0] if self._queue else float("inf")

    def take(self, now: float) -> tuple[float, Any] | None:
        """The next message, if it has arrived, and when it did."""
        if self.next > now:
            return None
        arrival, _, message = heapq.heappop(self._queue)
        return arrival, message


class VirtualDraft:
    """A draft engine whose steps take the time of their programs."""

    def __init__(self, engine: DraftEngine, times: Times) -> None:
        self.engine, self._times = engine, times
        self.inbox, self.now = Wire(), 0.0
        self._spent = 0.0
        runner: Any = engine.drafter.runner  # type: ignore[attr-defined]
        for method, seconds in (("run_tree", times.tree), ("run", times.level)):
            vars(runner)[method] = self._timed(getattr(type(runner), method).__get__(runner), seconds)

    def close(self) -> None:
        """Leave the engine as it was."""
        runner: Any = self.engine.drafter.runner  # type: ignore[attr-defined]
        del vars(runner)["run_tree"], vars(runner)["run"]

    def _timed(self, run: Any, seconds: float) -> Any:
        def timed(*arguments: Any) -> Any:
            self._spent += seconds
            return run(*arguments)

        return timed

    def run(self, until: float, out: Wire) -> None:
        """Work until a time; a step that has begun before ends after it."""
        while True:
            if self.engine.idle and self.inbox.next <= until:
                self.now = max(self.now, self.inbox.next)
            if self.now > until or (self.engine.idle and self.inbox.next > until):
                return
            while (arrived := self.inbox.take(self.now)) is not None:
                commits, features = arrived[1]
                self.engine.receive([], commits)
                self.engine.receive_features(features)
            if self.engine.idle:
                continue
            self._spent = 0.0
            proposals = self.engine.step().proposals
            self.now += self._spent
            if proposals:
                out.send(self.now + self._times.delay, proposals)


class VirtualTarget:
    """A target that verifies up to some draft tokens of a recorded text in each step."""

    def __init__(self, draft: VirtualDraft, times: Times, mode: Mode, most: int) -> None:
        """mode: WAITING waits for every answer, AUTO where that pays, others for none. most: draft tokens of a step."""
        self._draft, self._times, self._mode, self._most = draft, times, mode, most
        self.totals, self._gain, self._offset = Totals(), WaitGain(), 0.0

    def answer(self, recording: Recording) -> None:
        """Commit one recorded text."""
        opening, text = recording.opening, recording.text
        draft, proposals, now = self._draft, Wire(), 0.0
        draft.now, draft.inbox = 0.0, Wire()
        draft.engine.open(opening)
        session_id, start = opening.session_id, self._times.step
        tree, sent = SpeculationTree(opening.tokens), 0
        while tree.length < len(text):
            first = tree.length == opening.prompt_length
            begin = now if first else self._hold(tree, now, proposals)
            chosen = tree.select(0 if first else self._most, len(text) - tree.length - 1)
            path = _accepted(chosen, text[tree.length :].tolist())
            tokens = text[tree.length : tree.length + len(path) + 1]
            end, base = begin + self._times.step, tree.length
            tree.commit(tokens)
            if not first:
                totals = self.totals
                totals.tokens += len(tokens)
                totals.steps += 1
                totals.drafted += len(chosen) > 0
                totals.held += begin - now
                self._gain.committed(self._offset + end, [session_id], {session_id: len(path)}, len(tokens))
            reason = FinishReason.LENGTH if tree.length == len(text) else FinishReason.RUNNING
            commit = Commit(session_id, base, tokens, tree.root_hash, len(chosen), len(path), reason)
            block = FeatureBlock(session_id, sent, recording.features[sent : tree.length - 1])
            sent, now = tree.length - 1, end
            draft.inbox.send(end + self._times.delay, ([commit], [block]))
        draft.run(max(draft.now, draft.inbox.next), proposals)  # the last commit ends the session
        self.totals.seconds += now - start
        self._offset += now + 1e6  # the next answer comes after a pause

    def _hold(self, tree: SpeculationTree, now: float, proposals: Wire) -> float:
        """Merge what arrives until the next step begins; returns when that is."""
        deadline = float("inf") if self._mode is Mode.WAITING else now + longest_wait(self._times.step)
        waits = self._mode is Mode.WAITING
        self._draft.run(now, proposals)
        fresh = self._merge(tree, proposals, now)
        if self._mode is Mode.AUTO:
            waits = not len(tree) or self._gain.pays([promised(tree.select(self._most))])
        begin = now
        while waits and not fresh and begin < deadline:
            begin = min(self._next(begin, proposals), deadline)
            fresh = self._merge(tree, proposals, begin)
        return begin

    def _next(self, now: float, proposals: Wire) -> float:
        """When the next proposals arrive."""
        draft = self._draft
        while proposals.next > draft.now and (not draft.engine.idle or draft.inbox.next < float("inf")):
            draft.run(max(draft.now, now) if not draft.engine.idle else draft.inbox.next, proposals)
        return proposals.next

    def _merge(self, tree: SpeculationTree, proposals: Wire, now: float) -> bool:
        """Merge what has arrived. Returns True if it has an answer to the last commit."""
        fresh = False
        while (arrived := proposals.take(now)) is not None:
            found: Sequence[Proposal] = arrived[1]
            for proposal in found:
                tree.merge(proposal)
                if proposal.committed_length >= tree.length:
                    fresh = True
                    self._gain.answered(proposal.session_id, self._offset + arrived[0])
        return fresh


def _accepted(chosen: TreeSlice, text: Sequence[int]) -> list[int]:
    """The chosen nodes along a text, without its last token."""
    rows = {(parent, token): i for i, (parent, token) in enumerate(zip(chosen.parents, chosen.tokens, strict=True))}
    path: list[int] = []
    for token in text[:-1]:
        node = rows.get((path[-1] if path else ROOT, token))
        if node is None:
            break
        path.append(node)
    return path
