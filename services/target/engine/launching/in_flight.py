"""Steps that overlap: the next one is launched before the one before it is read.

    launch n+1   behind n, whose samples lie on the device: the roots of n+1 are taken from there
    read n       while the device computes n+1; sessions that end with n are left out when n+1 is read

While n+1 is planned, each session counts the token that n samples for it, which is not known yet. So a step can be
launched behind another only if its plan needs nothing but that: where no session has a grammar, penalties, or asks for
more than tokens. And there must be pages for all, because no session may be preempted for one that may be over.

Where n or n+1 has draft tokens, n+1 is prepared (step/prepared.py): the device chooses its draft tokens among those
that the host knows at the launch. The host repeats the choice once n is read. So until then the works of n+1 hold room.

What a step behind writes for a session that has ended stays in pages that were its own at the launch: the device works
in the order of launches, so a session that leases these pages next writes later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from services.target.features.features import StepFeatures
from services.target.sampling.samples import LaunchedStep, StepSamples
from services.target.sampling.session import TargetSession
from services.target.speculation.planner import Planner
from services.target.speculation.plans import StepPlan
from services.target.speculation.survivors import tree_tables
from services.target.step.batch import Batch, DeferredRoots, SessionWork
from services.target.step.prepared import TreeTables, resolve

_NOT_ACCEPTED = 0xFFFFFFFF  # a token that is never sampled


@dataclass
class InFlightStep:
    """A step that was launched and has not been read.

    started: when it was launched, by the clock
    rows:    tokens that are sampled for each of the works
    spoiled: sessions whose roots turned out to be others than the device took
    prepared: tables of a prepared step, and the sessions that they are of; None once it is resolved
    features: what it captures
    """

    plan: StepPlan
    launched: LaunchedStep
    started: float
    rows: Sequence[int] = ()
    spoiled: set[int] = field(default_factory=set)
    prepared: tuple[TreeTables, Sequence[Session]] | None = None
    features: StepFeatures = field(default_factory=StepFeatures)

    def __post_init__(self) -> None:
        self.rows = [len(work.draft.tokens) + 1 if work.chunk.last else 0 for work in self.works]
        self._leases = {
            work.chunk.session.id: work.chunk.stop + work.reach + len(work.draft)
            for work in self.works
            if work.reach is not None
        }

    @property
    def works(self) -> Sequence[SessionWork]:
        """What it computes of each session."""
        return self.plan.works

    @property
    def plain(self) -> bool:
        """True if it commits one token in each session that it samples for, or ends it."""
        return max(self.rows, default=0) <= 1

    @property
    def leases(self) -> Mapping[int, int]:
        """Tokens of sessions that a prepared step has pages for, by session id. Their roots are computed."""
        return {session_id: tokens for session_id, tokens in self._leases.items() if session_id not in self.spoiled}

    def sampling(self, entries: Mapping[int, TargetSession]) -> list[Session]:
        """Sessions that get tokens from it."""
        return [work.chunk.session for work in self.remaining(entries) if work.chunk.last]

    def remaining(self, entries: Mapping[int, TargetSession]) -> list[SessionWork]:
        """The works that still count."""
        return [work for work in self.works if self._kept(work, entries)]

    def read(
        self, entries: Mapping[int, TargetSession], behind: InFlightStep | None
    ) -> tuple[Sequence[SessionWork], StepSamples]:
        """The works that still count, and their samples. Waits for the device.

        behind: the next step, if it has been launched; its roots that turn out to be wrong are spoiled.
        """
        samples = self.launched.read()
        kept = [self._kept(work, entries) for work in self.works]
        if behind is not None and behind.prepared is not None:
            behind.resolve(samples.seen, *behind.prepared)
        elif behind is not None and samples.redrawn is not None:
            sampling = [(work, keep) for work, keep in zip(self.works, kept, strict=True) if work.chunk.last]
            for work, keep in compress(sampling, samples.redrawn):
                if keep:
                    behind.spoiled.add(work.chunk.session.id)
                    work.chunk.session.computed = work.chunk.stop
        works = self._walked(samples)
        if all(kept) and not self.plan.filler:
            return works, samples
        rows = np.array(self.rows)
        counts = [min(len(work.draft) + 1, count) * keep for work, count, keep in zip(works, rows, kept, strict=True)]
        places = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        tokens = samples.tokens[places < np.repeat(counts, rows)]
        return [work for work, keep in zip(works, kept, strict=True) if keep], replace(samples, tokens=tokens)

    def _walked(self, samples: StepSamples) -> Sequence[SessionWork]:
        """The works as the device walked them: no further than a node that was sampled again since."""
        if samples.redrawn is None or not samples.moved:
            return self.works
        works: list[SessionWork] = []
        for work, first in zip(self.works, (np.cumsum(self.rows) - self.rows).tolist(), strict=True):
            draft = work.draft
            cut = samples.redrawn[first + 1 + draft.parents]
            tokens = np.where(cut, np.uint32(_NOT_ACCEPTED), draft.tokens)
            works.append(replace(work, draft=replace(draft, tokens=tokens)) if cut.any() else work)
        return works

    def resolve(self, samples: NDArray[np.int64], tables: TreeTables, sessions: Sequence[Session]) -> None:
        """Find out what the device has chosen. samples: of the step before, as the device used them."""
        spans = {session.id: span for session, span in zip(sessions, resolve(samples, tables), strict=True)}
        works: list[SessionWork] = []
        for work in self.works:
            session = work.chunk.session
            if work.reach is None:
                works.append(work)
                continue
            span = spans[session.id]
            works.append(SessionWork(Chunk(session, span.position, span.position + 1), span.draft))
            if span.bonus < 0:
                self.spoiled.add(session.id)
                session.computed = session.length  # the root is still to be computed
        self.plan.filler = sum(len(work.draft) for work in self.works) - sum(len(work.draft) for work in works)
        self.plan.works, self.prepared = works, None

    def reaches(self, sessions: Sequence[Session]) -> list[int]:
        """Most draft tokens that it may accept of some sessions that it samples for."""
        depths = {work.chunk.session.id: int(work.draft.depths.max(initial=0)) for work in self.works}
        return [depths[session.id] for session in sessions]

    def tables(self, sessions: Sequence[Session], planner: Planner, entries: Mapping[int, TargetSession]) -> TreeTables:
        """The trees of sessions that this step samples for, for a step behind it."""
        at = {work.chunk.session.id: i for i, work in enumerate(self.works)}
        places = [at[session.id] for session in sessions]
        firsts = np.cumsum(self.rows) - self.rows
        return tree_tables(
            [entries[session.id].tree for session in sessions],
            [self.works[place].draft for place in places],
            firsts[places].tolist(),
            [planner.last_position(session) for session in sessions],
        )

    def _kept(self, work: SessionWork, entries: Mapping[int, TargetSession]) -> bool:
        """False if the session has ended, also if another one was opened in its place, or if its root was wrong."""
        entry = entries.get(work.chunk.session.id)
        return entry is not None and entry.session is work.chunk.session and entry.session.id not in self.spoiled

    def roots(self, batch: Batch, works: Sequence[SessionWork], sessions: Sequence[Session]) -> Batch:
        """The batch of the step behind, with the tokens that this one samples for these sessions."""
        assert self.plain, "a step behind draft tokens is prepared"
        place = {work.chunk.session.id: row for work, row in zip(self.works, np.cumsum(self.rows) - 1, strict=True)}
        taken = {session.id: place[session.id] for session in sessions}
        pairs = [
            (first, taken[work.chunk.session.id])
            for work, first in zip(works, batch.layout.first.tolist(), strict=False)
            if work.chunk.session.id in taken
        ]
        if not pairs:
            return batch
        assert all(len(work.chunk) == 1 for work in works if work.chunk.session.id in taken)
        rows, sources = np.array(pairs, np.int64).T.copy()
        roots = DeferredRoots(rows, sources, self.launched.tokens)
        if batch.device.type == "cpu":  # where a launch has ended when it returns
            roots.put(torch.from_numpy(batch.rows.ids))
            return batch
        return replace(batch, roots=roots)


@contextmanager
def expecting(sessions: Sequence[Session]) -> Iterator[None]:
    """Let sessions count the tokens that are being sampled for them."""
    for session in sessions:
        session.expect()
    try:
        yield
    finally:
        for session in sessions:
            session.unexpect()


def needs_only_length(entry: TargetSession) -> bool:
    """True for a session whose next token can be planned and sampled knowing nothing but its length."""
    return entry.tally is None and entry.matcher is None and entry.top is None and entry.session.scores.complete
