"""What every draft source does: it drafts for the sessions of a step, and learns from what was accepted.

    draft_service.py         proposals of draft services, which are there already
    prompt_lookup.py         what followed a session's last tokens when they occurred before
    quantized_self_draft.py  a copy of the target's weights in fewer bits
    local_eagle_head.py      an EAGLE-3 head in the target process

A source of the target itself drafts with the session's own randomness, so that many of its draft tokens are the
target's. It writes into the cache where the verification writes next: nothing of it remains there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from outrider.serving.loop import MessageWatch
from outrider.serving.session import Session
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.tree import TreeSlice
from services.target.sampling.session import TargetSession
from services.target.speculation.planner import Planner
from services.target.step.batch import SessionWork
from services.target.step.programs import FusedLoop, LoopIteration

MAX_CHAIN = 16  # draft tokens of a chain
MAX_ITERATIONS = 8  # of a fused loop, which the coalescing window ends earlier where steps are long
# Minimum predicted speedup over plain decoding: a smaller one may be an error of the prediction, and draft tokens end
# multi-step decoding for the whole batch. Eight sessions in int8 at temperature 1 had 0.97 times the throughput of
# plain steps with lookups from 1.02 on, 0.99 from 1.08 and 1.00 from 1.15.
MIN_SPEEDUP = 1.1
PROBE_INTERVAL = 256  # steps after which a source that does not pay is used in one
_PARENTS = np.arange(-1, MAX_CHAIN, dtype=np.int32)
_DEPTHS = np.arange(1, MAX_CHAIN + 1, dtype=np.int32)

Drafts = Mapping[int, TreeSlice]  # by session id


@dataclass(frozen=True)
class Demand:
    """A step that draft tokens are wanted for.

    works:     of the sessions to draft for
    sessions:  that sample in the step
    tokens:    of the step without draft tokens, prompts included
    kv_tokens: cached tokens of all its sessions
    rival:     the model source that drafts for these sessions otherwise, where it pays
    """

    works: Sequence[SessionWork]
    sessions: int
    tokens: int
    kv_tokens: int
    rival: ModelSource | None = None

    def of(self, works: Sequence[SessionWork]) -> Demand:
        """The same step, with draft tokens wanted for fewer sessions, and no rival."""
        return Demand(works, self.sessions, self.tokens, self.kv_tokens)


class DraftSource(ABC):
    """Draft tokens for one engine's sessions. kind: its name to requests and reports."""

    kind: ClassVar[SourceKind]

    def __init__(self, planner: Planner, sessions: Mapping[int, TargetSession]) -> None:
        """sessions: those that are open, by id."""
        self._planner, self._sessions = planner, sessions
        self.forget()

    @abstractmethod
    def forget(self) -> None:
        """Drop what sessions have taught."""

    @abstractmethod
    def draft(self, demand: Demand, listen: MessageWatch) -> Drafts:
        """Draft tokens that are worth their cost in a step, by session id, with pages for them.

        listen: how a message interrupts drafting that takes time
        """

    @abstractmethod
    def observe(self, session_id: int, draft: TreeSlice, path: Sequence[int], *, goes_on: bool) -> None:
        """Learn from a verified draft. path: its accepted nodes.

        goes_on: False if the session ended with it, however right the rest may have been
        """

    def opened(self, session_id: int) -> None:
        """A session begins."""
        del session_id

    def launched(self, works: Sequence[SessionWork]) -> None:
        """A step of the model is launched, which writes these tokens into the cache."""
        del works

    def closed(self, session_id: int) -> None:
        """A session has ended and returned its pages."""
        del session_id


class ModelSource(DraftSource):
    """A draft source that computes on the target's device.

    min_speedup: minimum predicted speedup over plain decoding
    """

    min_speedup: ClassVar[float] = MIN_SPEEDUP

    def __init__(self, planner: Planner, sessions: Mapping[int, TargetSession]) -> None:
        """As of DraftSource."""
        self._unused = 0  # consecutive steps in which it did not pay
        super().__init__(planner, sessions)

    def pays(self, sessions: int, kv_tokens: int) -> bool:
        """True if steps of this batch size are predicted to be faster with it, and in a step now and then when not.

        Texts change, and what is not used is not measured.
        """
        pays = self.exceeds_plain(sessions, kv_tokens)
        self._unused = 0 if pays or self._unused >= PROBE_INTERVAL else self._unused + 1
        return not self._unused

    def exceeds_plain(self, sessions: int, kv_tokens: int) -> bool:
        """True if steps are predicted to be faster with it than plain ones. kv_tokens: as of `throughput`."""
        plain = self._planner.budget.plain_throughput(sessions, kv_tokens)
        return self.throughput(sessions, kv_tokens) > self.min_speedup * plain

    @abstractmethod
    def throughput(self, sessions: int, kv_tokens: int) -> float:
        """Expected tokens per second of a step's sessions, all of them drafted for. kv_tokens: of all together."""

    @abstractmethod
    def loop(self, work: SessionWork, seconds: float) -> FusedLoop | None:
        """A fused loop for a session that is alone; None if that cannot be. seconds: no iteration begins later."""

    @abstractmethod
    def observe_loop(self, session: Session, iterations: Sequence[LoopIteration], *, goes_on: bool) -> None:
        """Learn from a fused loop, before its tokens are the session's. goes_on: False if the session ends with it."""

    def _most(self, works: Sequence[SessionWork]) -> int:
        """Most tokens of a chain for all of them; a session that allows fewer gets the first of them."""
        sessions = [work.chunk.session for work in works]
        depth = min(self._planner.depth(session) for session in sessions)
        return min(MAX_CHAIN, depth, max(session.drafting.max_tokens for session in sessions))

    def _reserve(self, works: Sequence[SessionWork], tokens: int) -> bool:
        """As of Planner.reserve."""
        return self._planner.reserve([work.chunk.session for work in works], tokens)


def chain_of(entry: TargetSession, tokens: list[int], rate: float) -> TreeSlice:
    """A draft chain up to a token that ends the session or could not be sampled.

    rate: acceptance rate of each token if its predecessors are accepted
    """
    count = verifiable(entry, tokens)
    return scored_chain(tokens[:count], np.log(np.float32(rate)) * _DEPTHS[:count])


def scored_chain(tokens: list[int], scores: NDArray[np.float32]) -> TreeSlice:
    """A draft chain. scores: [n], logs of the path probabilities."""
    return TreeSlice(np.array(tokens, np.uint32), _PARENTS[: len(tokens)], _DEPTHS[: len(tokens)], scores)


def verifiable(entry: TargetSession, tokens: Sequence[int]) -> int:
    """Tokens of a chain to verify: up to one that ends the session or could not be sampled, within its limit."""
    count = 0
    for token in tokens[: entry.session.drafting.max_tokens]:
        count += token >= 0
        if token < 0 or token in entry.stop_ids:
            break
    return count
