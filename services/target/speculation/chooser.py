"""Chooses, step by step, which of the target's own draft sources drafts for which sessions.

1. matches     prompt lookup where its chains let the step exceed plain decoding and the model source
2. drafts      the model source (quantized self-draft or local EAGLE head) for the other sessions, where it pays
3. neither     plain steps, several at once where the sessions are alone

A source drafts only for sessions that allow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.paging.prefix import PrefixCache
from outrider.serving.loop import MessageWatch
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.tree import TreeSlice
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model
from services.target.sampling.session import TargetSession
from services.target.speculation.planner import Planner
from services.target.speculation.sources.base import Demand, Drafts, DraftSource, ModelSource
from services.target.speculation.sources.local_eagle_head import LocalEagleHead
from services.target.speculation.sources.prompt_lookup import PromptLookup
from services.target.speculation.sources.quantized_self_draft import QuantizedSelfDraft
from services.target.step.batch import SessionWork
from services.target.step.programs import FusedLoop


@dataclass(frozen=True)
class Choice:
    """What to verify in a step.

    works:   of the step, with draft tokens
    sources: of each session that has some, by id
    loop:    what to compute instead of a step
    """

    works: Sequence[SessionWork]
    sources: Mapping[int, DraftSource] = field(default_factory=dict)
    loop: tuple[ModelSource, FusedLoop] | None = None


class SourceChooser:
    """Chooses for one engine.

    lookup: prompt lookup; source: the model source, if the model has one
    looks_up: False turns prompt lookup off, for measurements of the source
    always: the source drafts even where it is predicted not to pay, to be measured
    """

    def __init__(self, planner: Planner, sessions: Mapping[int, TargetSession], source: ModelSource | None) -> None:
        """sessions: those that are open, by id."""
        self.lookup = PromptLookup(planner, sessions)
        self.source = source
        self.looks_up, self.always = True, False
        self._planner, self._sessions = planner, sessions

    @property
    def _sources(self) -> list[DraftSource]:
        return [self.lookup] if self.source is None else [self.lookup, self.source]

    @property
    def kinds(self) -> frozenset[SourceKind]:
        """The target's own draft sources."""
        return frozenset(source.kind for source in self._sources)

    def forget(self) -> None:
        """Drop what sessions have taught."""
        for source in self._sources:
            source.forget()

    def launched(self, works: Sequence[SessionWork]) -> None:
        """As of DraftSource."""
        for source in self._sources:
            source.launched(works)

    def closed(self, session_id: int) -> None:
        """As of DraftSource."""
        for source in self._sources:
            source.closed(session_id)

    def choose(self, works: Sequence[SessionWork], listen: MessageWatch, loop_seconds: float) -> Choice:
        """Draft for those sessions of a step that only decode and have no draft tokens yet.

        listen: how a message interrupts the drafting. loop_seconds: after which a fused loop begins no iteration; 0
        for no loops.
        """
        tokens, kv_tokens = sum(len(work.chunk) for work in works), sum(work.chunk.stop for work in works)
        served = [work for work in works if self._serves(work)]
        demand = Demand(served, len(works), tokens, kv_tokens)
        source = self.source
        if source is not None and not source.pays(demand.sessions, kv_tokens) and not self.always:
            source = None
        found: Drafts = self._look_up(demand, source, listen) if self.looks_up else {}
        rest = [work for work in demand.works if work.chunk.session.id not in found and _allows(work, source)]
        drafted: Drafts = {}
        if rest and source is not None:
            if loop_seconds and len(works) == len(rest) == 1 and (loop := source.loop(rest[0], loop_seconds)):
                return Choice(works, loop=(source, loop))
            drafted = source.draft(demand.of(rest), listen)
        if not found and not drafted:
            return Choice(works)
        sources: dict[int, DraftSource] = dict.fromkeys(found, self.lookup)
        if source is not None:
            sources |= dict.fromkeys(drafted, source)
        drafts = {**found, **drafted}
        return Choice([replace(work, draft=drafts.get(work.chunk.session.id, work.draft)) for work in works], sources)

    def _serves(self, work: SessionWork) -> bool:
        """True for a session that only wants its next tokens. Drafts of grammars are left to the draft service."""
        chunk = work.chunk
        session = chunk.session
        if len(chunk) > 1 or not chunk.last or not session.drafting.sources or len(work.draft.tokens):
            return False
        return self._sessions[session.id].matcher is None and self._planner.depth(session) > 0

    def _look_up(self, demand: Demand, source: ModelSource | None, listen: MessageWatch) -> Drafts:
        """Lookups of sessions that allow them. Where the source may not draft, they are compared with plain steps."""
        works = [work for work in demand.works if _allows(work, self.lookup)]
        rivalled = [work for work in works if _allows(work, source)]
        found: dict[int, TreeSlice] = {}
        if not works or rivalled:
            found |= self.lookup.draft(replace(demand, works=rivalled, rival=source), listen)
        if len(rivalled) < len(works):
            others = [work for work in works if not _allows(work, source)]
            found |= self.lookup.draft(replace(demand, works=others), listen)
        return found


def _allows(work: SessionWork, source: DraftSource | None) -> bool:
    return source is not None and source.kind in work.chunk.session.drafting.sources


def model_source(
    model: Model, cache: KVCache, prefix: PrefixCache, planner: Planner, sessions: Mapping[int, TargetSession]
) -> ModelSource | None:
    """The model source of a model's sessions, if it has one."""
    if model.copied:
        return QuantizedSelfDraft(model, cache, planner, sessions)
    return None if model.head is None else LocalEagleHead(model, model.head, cache, prefix, planner, sessions)
