"""Steps that overlap: the next one is launched before the one before it is read.

    launch n+1   behind n, whose samples lie on the device: the roots of n+1 are taken from there
    read n       while the device computes n+1; sessions that end with n are left out when n+1 is read

While n+1 is planned, each session counts the token that n samples for it, which is not known yet. So a step can be
launched behind another only if its plan needs nothing but that: where no session has draft tokens that pay, a grammar,
penalties, or asks for more than tokens. And there must be pages for all, because no session may be preempted for one
that may be over.

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

from outrider.serving.session import Session
from services.target.sampling.samples import LaunchedStep, StepSamples
from services.target.sampling.session import TargetSession
from services.target.speculation.plans import StepPlan
from services.target.step.batch import Batch, Roots, SessionWork


@dataclass
class InFlightStep:
    """A step that was launched and has not been read.

    started: when it was launched, by the clock
    rows:    tokens that are sampled for each of the works
    spoiled: sessions whose roots turned out to be others than the device took
    """

    plan: StepPlan
    launched: LaunchedStep
    started: float
    rows: Sequence[int] = ()
    spoiled: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rows = [len(work.draft.tokens) + 1 if work.chunk.last else 0 for work in self.works]

    @property
    def works(self) -> Sequence[SessionWork]:
        """What it computes of each session."""
        return self.plan.works

    @property
    def plain(self) -> bool:
        """True if it commits one token in each session that it samples for, or ends it."""
        return not any(len(work.draft) for work in self.works)

    def sampling(self, entries: Mapping[int, TargetSession]) -> list[Session]:
        """Sessions that get tokens from it."""
        return [work.chunk.session for work in self.works if work.chunk.last and self._kept(work, entries)]

    def read(
        self, entries: Mapping[int, TargetSession], behind: InFlightStep | None
    ) -> tuple[Sequence[SessionWork], StepSamples]:
        """The works that still count, and their samples. Waits for the device.

        behind: the next step, if it has been launched; its roots that turn out to be wrong are spoiled.
        """
        samples = self.launched.read()
        kept = [self._kept(work, entries) for work in self.works]
        if behind is not None and samples.redrawn is not None:
            sampling = [(work, keep) for work, keep in zip(self.works, kept, strict=True) if work.chunk.last]
            for work, keep in compress(sampling, samples.redrawn):
                if keep:
                    behind.spoiled.add(work.chunk.session.id)
                    work.chunk.session.computed = work.chunk.stop
        if all(kept):
            return self.works, samples
        works = [work for work, keep in zip(self.works, kept, strict=True) if keep]
        return works, replace(samples, tokens=samples.tokens[np.repeat(kept, self.rows)])

    def _kept(self, work: SessionWork, entries: Mapping[int, TargetSession]) -> bool:
        """False if the session has ended, also if another one was opened in its place, or if its root was wrong."""
        entry = entries.get(work.chunk.session.id)
        return entry is not None and entry.session is work.chunk.session and entry.session.id not in self.spoiled

    def roots(self, batch: Batch, works: Sequence[SessionWork], sessions: Sequence[Session]) -> Batch:
        """The batch of the step behind, with the tokens that this one samples for these sessions."""
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
        roots = Roots(rows, sources, self.launched.tokens)
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
    return (
        entry.tally is None
        and entry.matcher is None
        and entry.top is None
        and entry.session.scored == entry.session.to_score
    )
