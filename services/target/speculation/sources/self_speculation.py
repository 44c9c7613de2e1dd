"""Drafts that a target makes itself, for sessions that only want their next tokens: what their text repeats
(prompt_lookup.py), and what a narrow copy of the weights or a head guesses (base.py). Step by step, what brings more
its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from outrider.paging.prefix import PrefixCache
from outrider.serving.loop import MessageWatch
from outrider.serving.scheduler import Scheduler
from outrider.serving.session import Session
from outrider.speculation.tree import TreeSlice
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model
from services.target.sampling.session import TargetSession
from services.target.speculation.estimates.cached_estimate import CachedEstimate
from services.target.speculation.planner import Planner
from services.target.speculation.sources.base import LONGEST, DraftSource, chain_of
from services.target.speculation.sources.local_eagle_head import LocalEagleHead
from services.target.speculation.sources.prompt_lookup import LEAST, PromptLookup, find
from services.target.speculation.sources.quantized_self_draft import QuantizedSelfDraft
from services.target.step.batch import MultiStep, SessionWork
from services.target.step.fused_loop import LoopRound

# That a chain from the text must have over plain steps, whose burst it ends for all sessions. With a lead of 1.02 eight
# at once in int8 had 0.97 times the tokens of plain steps at temperature 1, with 1.08 0.99, with 1.15 1.00.
_LEAD = 1.1
_AGAIN = 64  # steps after which what pays is judged again


class SelfSpeculation:
    """Drafts for one engine's sessions."""

    def __init__(
        self, chains: DraftSource | None, planner: Planner, scheduler: Scheduler, entries: Mapping[int, TargetSession]
    ) -> None:
        """chains: of models that guess. entries: of the sessions that are open, by id."""
        self.chains = chains
        self.repeats = PromptLookup()
        self.prompt_lookup = True
        self._planner, self._scheduler, self._entries = planner, scheduler, entries
        self._same: dict[int, int] = {}  # of the chains under way that are from texts, by session
        self._guessing = False  # in the step at hand
        self._rounds: MultiStep | None = None  # in its place
        self._least = CachedEstimate[int](_AGAIN)  # by sessions, with guesses or without

    def forget(self) -> None:
        """Begin anew with what texts taught."""
        self.repeats.forget()
        self._least.forget()
        if self.chains is not None:
            self.chains.forget()

    def observe(self, session_id: int, draft: TreeSlice, path: Sequence[int], *, goes_on: bool) -> None:
        """Take in what became of a session's chain. path: accepted nodes; goes_on: False if the session ended there."""
        same = self._same.pop(session_id, 0)
        if same:
            self.repeats.observe(same, len(draft), len(path), goes_on=goes_on)
        elif self.chains is not None:
            self.chains.observe(session_id, draft, path, goes_on=goes_on)

    def computed(self, works: Sequence[SessionWork]) -> None:
        """A step is launched that writes these rows."""
        if self.chains is not None:
            self.chains.computed(works)

    def close(self, session_id: int) -> None:
        """A session has ended, and its pages are home."""
        if self.chains is not None:
            self.chains.close(session_id)

    def learn(self, session: Session, rounds: Sequence[LoopRound], *, goes_on: bool) -> None:
        """Take in what came of a session's rounds; see DraftSource."""
        assert self.chains is not None, "it guessed in them"
        self.chains.learn(session, rounds, goes_on=goes_on)

    def extend(
        self, works: Sequence[SessionWork], listen: MessageWatch, *, guessing: bool, seconds: float = 0.0
    ) -> Sequence[SessionWork]:
        """The works of a step, with chains to verify for those sessions that only decode.

        listen: how somebody who calls is heard meanwhile. guessing: chains may be guessed where texts say nothing.
        seconds: in which rounds may follow one another, if there is one session; 0 is not at all
        """
        self._same.clear()
        self._rounds = None
        self._guessing = guessing and self.chains is not None and self.chains.pays(works)
        serving = [work for work in works if self._serves(work)]
        if not serving:
            return works
        chains = self._repeated(serving, works) if self.prompt_lookup else {}
        rest = [work for work in serving if work.chunk.session.id not in chains]
        if rest and self._guessing and self.chains is not None:
            self._rounds = self.chains.rounds(rest[0], seconds) if seconds and len(works) == len(rest) == 1 else None
            beside = sum(len(work.chunk) for work in works) - len(rest)
            chains |= self.chains.chains(rest, listen, beside) if self._rounds is None else {}
        if not chains:
            return works
        none = works[0].draft  # nobody has any yet
        return [replace(work, draft=chains.get(work.chunk.session.id, none), own=True) for work in works]

    def take_rounds(self) -> MultiStep | None:
        """What is to be computed in the place of a step that was extended, if that is rounds; said once."""
        rounds, self._rounds = self._rounds, None
        return rounds

    def least(self, sessions: int, keys: int) -> int:
        """How many last tokens must have stood in a text before for a look back to pay; 0 if none do.

        A burst of plain steps ends there. keys: of all sessions together.
        """
        if not self.prompt_lookup:
            return 0
        return self._least.get((sessions, self._guessing), lambda: self._judge(sessions, keys))

    def _judge(self, sessions: int, keys: int) -> int:
        """`least`, as of now."""
        self.repeats.fade()
        rate = self._other_rate(sessions, keys)
        chances = enumerate(self.repeats.chances().tolist(), LEAST)
        pays = (same for same, one in chances if self._gain(one, 1, LONGEST, sessions, sessions, keys)[1] > rate)
        return next(pays, 0)

    def _serves(self, work: SessionWork) -> bool:
        """True for a session that only wants its next tokens. What a grammar allows, nobody here knows."""
        chunk = work.chunk
        session = chunk.session
        if len(chunk) > 1 or not chunk.last or not session.max_draft_tokens:
            return False
        return self._entries[session.id].matcher is None and self._planner.depth(session) > 0

    def _repeated(self, serving: Sequence[SessionWork], works: Sequence[SessionWork]) -> dict[int, TreeSlice]:
        """Chains from the texts of some sessions, where they pay."""
        rows, keys = sum(len(work.chunk) for work in works), sum(work.chunk.stop for work in works)
        least = self.least(len(works), keys)
        if not least:
            return {}
        found: list[tuple[SessionWork, int, NDArray[np.uint32]]] = []
        for work in serving:
            session = work.chunk.session
            most = min(self._planner.depth(session), session.max_draft_tokens, self._planner.max_rows - 1, LONGEST)
            same, tokens = find(session.tokens, most)
            if same >= least and len(tokens):
                found.append((work, same, tokens))
        rate = self._other_rate(len(works), keys) if found else 0.0
        chains = {}
        for work, same, tokens in found:
            chance, session = self.repeats.chance(same), work.chunk.session
            count, gained = self._gain(chance, len(found), len(tokens), len(works), rows, keys)
            if gained <= rate or not self._scheduler.reserve_spare(session, session.length + count):
                continue
            chain = chain_of(self._entries[session.id], tokens[:count].tolist(), chance)
            if len(chain):
                chains[session.id], self._same[session.id] = chain, same
        return chains

    def _gain(self, chance: float, chains: int, most: int, sessions: int, rows: int, keys: int) -> tuple[int, float]:
        """The best length of so many chains, and the tokens a second of all sessions with it."""
        lengths = np.arange(1, most + 1)
        tokens = sessions + chains * np.cumsum(chance**lengths)
        cost = self._planner.budget.cost
        rates = tokens / (cost.seconds(rows + chains * lengths, keys) - cost.others(rows, sessions))
        best = int(np.argmax(rates))
        return best + 1, float(rates[best])

    def _other_rate(self, sessions: int, keys: int) -> float:
        """What a chain from the text must bring, in tokens a second of all sessions."""
        step, _ = self._planner.budget.cost.step(sessions, keys)
        guessed = self.chains.rate(sessions, keys) if self._guessing and self.chains is not None else 0.0
        return max(_LEAD / step, guessed) * sessions


def self_draft(
    model: Model,
    cache: KVCache,
    prefix: PrefixCache,
    planner: Planner,
    scheduler: Scheduler,
    entries: Mapping[int, TargetSession],
) -> DraftSource | None:
    """What guesses for a model's sessions, if it has anything that does."""
    if model.copied:
        return QuantizedSelfDraft(model, cache, prefix, planner, scheduler, entries)
    return None if model.head is None else LocalEagleHead(model, model.head, cache, prefix, planner, scheduler, entries)
