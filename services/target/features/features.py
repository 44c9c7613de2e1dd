"""Hidden states for feature-based drafters: which rows of a step are captured, fused and sent, and to which session.

    capture  before the forward pass: request the rows of sessions that want features
    take     after it: fuse them, unless a compiled program has, and start the copy to the host, which ends before the
             step's tokens arrive
    settle   keep the rows of committed tokens, in order of position: of a chunk, and of the accepted path's nodes

While drafting is paused, fusion is deferred: the states of many steps are fused at once, when there are many rows, when
drafting resumes, or when a session finds their page in the prefix cache. States that need no fusion are sent every step
even then: this costs almost nothing, and a drafter that learns from them needs those of short sessions too, whose rows
the draft service ignores after their last commit.

A session is sent each position once, also if its rows are computed again after it lost its pages.

All sessions share pages of the prefix cache. So that a drafter finds the rows of a prompt that another session computed
without one (speculation off, or no draft at the time), the rows of such a session's prompt are kept, too, and sent to
no drafter. A page without rows is computed again by the session whose drafter lacks them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureBlock, FeatureSpec
from outrider.serving.messages import OpenSession
from outrider.serving.scheduler import Chunk
from services.target.features.deferred import DeferredStates
from services.target.features.fusion import Fusion
from services.target.features.registry import FusionRegistry
from services.target.features.store import FeatureStore
from services.target.kernels.cpu.matrices.weights import PackedWeight
from services.target.model.base import Model
from services.target.step.batch import Batch, Capture, SessionWork

log = logging.getLogger(__name__)

_MAX_DEFERRED_ROWS = 256  # few enough that the step that fuses them is hardly longer than others
_ENDED = sys.maxsize


@dataclass
class Subscription:
    """A session whose rows are needed: it is sent features, or only the cached pages of its prompt keep them.

    spec_id: its specification; next: the first position not sent yet, _ENDED once it needs no more; fresh: the first
    position whose rows are unknown under the present weights, at most `next`; until: the position from which on no
    rows are needed
    """

    spec_id: int
    fusion: Fusion
    next: int
    fresh: int
    until: int = _ENDED


@dataclass(frozen=True)
class _StepRows:
    """A session's rows among those that a fusion makes in a step.

    known: tokens of its chunk before the first row; offset: of the first row; committed: rows before those of draft
    nodes
    """

    fusion: Fusion
    known: int
    offset: int
    committed: int


@dataclass
class StepFeatures:
    """What a step captures.

    counts: rows of each fusion; host: their copies on the host; arrived: the event behind these; rows: the sessions'
    rows among them, by id
    chunks: of a step with deferred fusion; states: of its chunks with draft nodes; firsts: their first rows
    """

    counts: dict[Fusion, int] = field(default_factory=dict)
    host: dict[Fusion, Tensor] = field(default_factory=dict)
    arrived: torch.cuda.Event | None = None
    rows: dict[int, _StepRows] = field(default_factory=dict)
    chunks: Sequence[Chunk] | None = None
    states: Tensor | None = None
    firsts: dict[int, int] = field(default_factory=dict)

    @property
    def deferred(self) -> bool:
        """True if fusion is deferred."""
        return self.chunks is not None


class Features:
    """The features of one engine's sessions. Only the engine thread uses it.

    registry: the specifications; store: rows of cached pages, if any; deferred: states not fused yet
    """

    def __init__(self, model: Model, prefix: PrefixCache, cache_bytes: int) -> None:
        """cache_bytes: host memory for the features of cached pages."""
        self._model = model
        self.registry = FusionRegistry(model)
        self._subscriptions: dict[int, Subscription] = {}  # by session id
        self._ready: list[FeatureBlock] = []
        self.step = StepFeatures()  # of the step that is being launched, or settled
        self._last_capture: tuple[set[Fusion], int, Capture] | None = None  # of the last step with deferred fusion
        self.deferred = DeferredStates()
        self._sent: set[int] = set()  # sessions that are sent features
        self._unread: set[int] = set()  # sessions without a drafter, the rows of whose prompt are still needed
        self._stores_rows = prefix.enabled and cache_bytes > 0
        self.store: FeatureStore | None = None
        if prefix.enabled:
            size = prefix.allocator.page_size
            self.store = FeatureStore(size, cache_bytes, self._lacks, self._send, self._catch_up)
            prefix.observers.append(self.store)

    # --- subscriptions ---

    @property
    def subscriptions(self) -> Mapping[int, Subscription]:
        """The sessions whose rows are or were needed, by id."""
        return self._subscriptions

    def configure(self, spec_id: int, spec: FeatureSpec, content: bytes) -> Fusion:
        """Register a specification. content: its fusion as a safetensors file, or empty. Raises ConfigError."""
        return self.registry.configure(spec_id, spec, content)

    def open(self, request: OpenSession) -> None:
        """Subscribe a session.

        A session with an unknown specification continues without features, which only lowers its accept length.
        """
        spec_id, first, until = request.feature_spec, request.features_from, _ENDED
        if spec_id and spec_id not in self.registry.fusions:
            log.warning("session %d wants features with an unknown specification; it gets none", request.session_id)
            spec_id = 0
        if not spec_id:
            spec_id, first, until = self.registry.latest if self._stores_rows else 0, _ENDED, len(request.tokens)
        if not spec_id:
            return
        if self.deferred.includes(request.session_id):
            self._catch_up()  # these states belong to an earlier session of the same id
        fusion = self.registry.acquire(spec_id)
        assert request.session_id not in self._subscriptions, "an earlier session of the same id is closed"
        # With a store, rows before `features_from` are computed too, because other sessions may find their pages.
        fresh = 0 if self._stores_rows else first
        self._subscriptions[request.session_id] = Subscription(spec_id, fusion, first, fresh, until)
        (self._sent if until == _ENDED else self._unread).add(request.session_id)
        if self.store is not None:
            self.store.open(request.session_id, spec_id, until)

    @property
    def asked(self) -> bool:
        """True if a session is sent features."""
        return bool(self._sent)

    @property
    def captures(self) -> bool:
        """True if rows of the next step are needed."""
        return bool(self._sent or self._unread)

    def close(self, session_id: int) -> None:
        """End a subscription, after the session has given its pages back."""
        subscription = self._subscriptions.get(session_id)
        if subscription is None:
            return
        subscription.next = _ENDED
        self._sent.discard(session_id)
        self._unread.discard(session_id)
        self._catch_up()
        if self.store is not None:
            self.store.close(session_id)
        del self._subscriptions[session_id]
        self.registry.release(subscription.fusion)

    def forget(self) -> None:
        """Drop the rows of cached pages, because the weights have changed. Rows already sent remain valid."""
        self._catch_up()
        if self.store is not None:
            self.store.forget()
            for subscription in self._subscriptions.values():
                subscription.fresh = 0

    # --- a step ---

    def capture(self, works: Sequence[SessionWork], *, deferred: bool = False) -> Capture | None:
        """The capture that a step needs; None if no session needs its rows.

        deferred: drafting is paused, so that draft nodes are the target's own and fusion may wait
        """
        self.step = StepFeatures()
        if not self.captures:
            return None
        if deferred:
            self.step.chunks = [work.chunk for work in works]
            return self._capture_all(works)
        self._catch_up()
        chosen: dict[Fusion, list[int]] = {}
        behind = 0  # rows of works so far
        for work in works:
            chunk, first = work.chunk, behind
            behind += len(chunk) + len(work.draft.tokens)
            subscription = self._subscriptions.get(chunk.session.id)
            if subscription is None or chunk.start >= subscription.until:
                continue
            known = min(max(0, subscription.fresh - chunk.start), len(chunk))  # rows computed again
            if first + known == behind:
                continue
            own = chosen.setdefault(subscription.fusion, [])
            self.step.rows[chunk.session.id] = _StepRows(subscription.fusion, known, len(own), len(chunk) - known)
            own += range(first + known, behind)
        if not chosen:
            return None
        self.step.counts = {fusion: len(rows) for fusion, rows in chosen.items()}
        fusion = next(iter(chosen)).layer if len(chosen) == 1 else None  # as in most steps
        return _capture(chosen, [row for rows in chosen.values() for row in rows], fusion)

    def _capture_all(self, works: Sequence[SessionWork]) -> Capture:
        """The capture of all rows of a step with deferred fusion; usually the same as in the step before."""
        rows = 0
        drafts = any(work.draft for work in works)
        for work in works:
            if drafts:
                self.step.firsts[work.chunk.session.id] = rows
            rows += len(work.chunk) + len(work.draft.tokens)
        fusions = set(self.registry.users)
        if self._last_capture is None or self._last_capture[:2] != (fusions, rows):
            self._last_capture = fusions, rows, _capture(fusions, range(rows))
        return self._last_capture[2]

    def take(self, batch: Batch, states: Tensor | None) -> None:
        """Take the states that the forward pass captured. states: [F, W], None without a capture."""
        if batch.capture is None:
            return
        assert states is not None, "a runner returns what a batch captures"
        step = self.step
        if step.firsts:
            step.states = states
            return
        if step.chunks is not None:
            for nth, part in enumerate(states.split(len(batch))):  # more than one with multi-step decoding
                chunks = [Chunk(c.session, c.start + nth, c.stop + nth) for c in step.chunks]
                self.deferred.add(chunks, batch.capture, part)
            return
        if batch.capture.fusion is not None:
            (fusion,) = step.counts
            step.host = {fusion: states.view(torch.uint8)}
            return
        parts = states.split(list(step.counts.values()))
        for fusion, part in zip(step.counts, parts, strict=True):
            step.host[fusion] = fusion.apply(fusion.select(part, batch.capture)).to("cpu", non_blocking=True)
        if self._model.device.type == "cuda":
            step.arrived = torch.cuda.Event()
            step.arrived.record()

    def settle(self, work: SessionWork, path: Sequence[int], *, goes_on: bool) -> None:
        """Take over a session's committed rows. path: accepted nodes; goes_on: False if the session ends here."""
        session_id = work.chunk.session.id
        if session_id in self._unread and work.chunk.stop >= self._subscriptions[session_id].until:
            self._unread.discard(session_id)
        if not goes_on and session_id in self._subscriptions:
            self._subscriptions[session_id].next = _ENDED
        step = self.step
        if session_id in step.firsts:
            self._settle_deferred(work, path, step.firsts[session_id])
        step_rows = step.rows.pop(session_id, None)
        if step_rows is None:
            return
        if step.arrived is not None:  # the copy precedes the step's tokens, if the step samples any
            step.arrived.synchronize()
            step.arrived = None
        behind = step_rows.offset + step_rows.committed
        rows = [*range(step_rows.offset, behind), *(behind + node for node in path)]
        if rows:
            first = work.chunk.start + step_rows.known
            self._keep(session_id, first, step.host[step_rows.fusion].numpy()[rows])

    def _settle_deferred(self, work: SessionWork, path: Sequence[int], first: int) -> None:
        """As `settle`, for a session whose fusion is deferred. first: its first row."""
        chunk, last, states = work.chunk, self._last_capture, self.step.states
        assert last is not None, "the step was captured"
        assert states is not None, "the states were taken"
        behind = first + len(chunk)
        rows = [*range(first, behind), *(behind + node for node in path)]
        reach = Chunk(chunk.session, chunk.start, chunk.start + len(rows))
        self.deferred.add([reach], last[2], states[rows])

    def flush(self, *, deferred: bool = False) -> list[FeatureBlock]:
        """The rows to send at a step's end, in order of position. deferred: drafting is paused from here on."""
        self.step.host.clear()
        if (
            not deferred
            or self.deferred.rows >= _MAX_DEFERRED_ROWS
            or not all(fusion.fuses for fusion in self.registry.users)
        ):
            self._catch_up()
        ready, self._ready = self._ready, []
        return ready

    def _catch_up(self) -> None:
        """Fuse the deferred states."""
        if self.deferred.rows:
            for session_id, first, rows in self.deferred.fuse(self._fusion_of):
                self._keep(session_id, first, rows)

    def _fusion_of(self, session_id: int) -> Fusion | None:
        subscription = self._subscriptions.get(session_id)
        return None if subscription is None else subscription.fusion

    # --- destinations of rows ---

    def _keep(self, session_id: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Store and send rows of committed tokens. first: position of the first one."""
        if self.store is not None:
            self.store.add(session_id, first, rows)
        self._send(session_id, first, rows)

    def _lacks(self, session_id: int, end: int) -> bool:
        """True if a session has not been sent all rows before a position."""
        return self._subscriptions[session_id].next < end

    def _send(self, session_id: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Send rows of a step, or of a page that the session found in the prefix cache."""
        subscription = self._subscriptions[session_id]
        end = first + len(rows)
        subscription.fresh = max(subscription.fresh, end)
        if subscription.next < end:
            sent = max(0, subscription.next - first)
            self._ready.append(FeatureBlock(session_id, first + sent, rows[sent:], subscription.spec_id))
            subscription.next = end


def _capture(
    fusions: Collection[Fusion], rows: Sequence[int], layer: tuple[PackedWeight, Tensor | None] | None = None
) -> Capture:
    """The capture that fusions need of some rows of the batch. layer: fusion layer that the program applies itself."""
    layers = tuple(sorted({layer for fusion in fusions for layer in fusion.layers}))
    return Capture(layers, any(fusion.final for fusion in fusions), np.array(rows, np.int64), layer)
