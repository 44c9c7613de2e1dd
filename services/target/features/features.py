"""Hidden states for drafters that feed on them: which rows of a step, what is made of them, to whom they go.

    capture  before the forward pass: ask it for the rows of sessions that want features, and for no others
    take     after it: fuse them, unless a compiled program has, and start the way to the host, which ends when the
             step's tokens have come
    settle   keep the rows of committed tokens, in order of position: of a chunk, and of the accepted path's nodes

While no hints are wanted nobody is in a hurry for them: the states of many steps are then fused at once, when they have
become many, when hints are wanted again, or when somebody finds their page in the cache. States that are sent as they
are leave step by step all the same: that costs next to nothing, and who learns from them wants those of short sessions,
too, for which a draft cares no longer once their last commit has come.

A session is sent each position once, also if its rows are computed again after it lost its pages.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureBlock, FeatureSpec
from outrider.serving.messages import OpenSession
from outrider.serving.scheduler import Chunk
from services.target.features.fusion import Fusion
from services.target.features.store import FeatureStore
from services.target.kernels.cpu.weights import PackedWeight
from services.target.model.base import Model
from services.target.step.batch import Batch, Capture, SessionWork

log = logging.getLogger(__name__)

_MOST_SPECS = 8
_MOST_UNFUSED = 256  # rows that wait to be fused: few enough for the step that does it to be hardly longer than others
_ENDED = sys.maxsize


@dataclass
class _Wanted:
    """A session that is sent features.

    spec_id: the name of what it asked for; next: the first position that it has not been sent, _ENDED if it needs no
    more; fresh: the first one whose rows are not known under the present weights, at most `next`
    """

    spec_id: int
    fusion: Fusion
    next: int
    fresh: int


@dataclass(frozen=True)
class _Share:
    """A session's rows among those that a fusion makes in the step under way.

    position: of the first row, in tokens; offset: of the first row; committed: rows before those of draft nodes
    """

    fusion: Fusion
    position: int
    offset: int
    committed: int


class _Unfused(NamedTuple):
    """A step whose states wait to be fused: those of all its rows, chunk after chunk. states: [rows, W]."""

    chunks: Sequence[Chunk]
    capture: Capture
    states: Tensor


class Features:
    """The features of one engine's sessions. One owner, the engine thread."""

    def __init__(self, model: Model, prefix: PrefixCache, cache_bytes: int) -> None:
        """cache_bytes: host memory for the features of cached pages."""
        self._model = model
        self._fusions: dict[int, Fusion] = {}  # what was asked for longest ago stands first
        self._wanted: dict[int, _Wanted] = {}
        self._used: Counter[Fusion] = Counter()  # by how many of them: steps ask what all want
        self._ready: list[FeatureBlock] = []
        # Of the step under way: how many rows each fusion makes, they on the host, and whose they are; or its chunks,
        # if its rows wait.
        self._counts: dict[Fusion, int] = {}
        self._host: dict[Fusion, Tensor] = {}
        self._shares: dict[int, _Share] = {}
        self._arrived: torch.cuda.Event | None = None
        self._late: Sequence[Chunk] | None = None
        self._late_states: Tensor | None = None  # of chunks with drafts behind them, and where each one's rows begin
        self._late_first: dict[int, int] = {}
        self._usual: tuple[set[Fusion], int, Capture] | None = None  # what steps whose rows wait ask for
        self._unfused: list[_Unfused] = []
        self._unfused_rows = 0
        self._openings = itertools.count()
        self._store: FeatureStore | None = None
        if prefix.enabled and cache_bytes > 0:
            size = prefix.allocator.page_size
            self._store = FeatureStore(size, cache_bytes, self._lacks, self._send, self._catch_up)
            prefix.observers.append(self._store)

    # --- who wants what ---

    def configure(self, spec_id: int, spec: FeatureSpec, content: bytes) -> Fusion:
        """Get to know a specification. content: its fusion as a file, or nothing. Raises ConfigError."""
        if spec_id not in self._fusions:
            self._forget_unused()
            self._fusions[spec_id] = fusion = Fusion(spec, content, self._model)
            log.info(
                "features of layers %s%s: %d numbers, %d bytes a token", list(fusion.layers),
                " and the end" if fusion.final else "", fusion.width, fusion.row_bytes,
            )  # fmt: skip
        return self._asked_for(spec_id)

    def _asked_for(self, spec_id: int) -> Fusion:
        self._fusions[spec_id] = fusion = self._fusions.pop(spec_id)
        return fusion

    def _forget_unused(self) -> None:
        """Keep a few specifications: a drafter that comes back in another version leaves its last one behind."""
        unused = [name for name, fusion in self._fusions.items() if fusion not in self._used]
        for name in unused[: max(0, len(self._fusions) - _MOST_SPECS + 1)]:
            del self._fusions[name]

    def open(self, request: OpenSession) -> OpenSession:
        """Note what a session wants. Returns it with a namespace of its own for pages whose features are kept.

        A session whose specification is not known goes on without: it only speculates worse.
        """
        if not request.feature_spec:
            return request
        if request.feature_spec not in self._fusions:
            log.warning("session %d wants features that nobody has configured; it gets none", request.session_id)
            return request
        if any(chunk.session.id == request.session_id for step in self._unfused for chunk in step.chunks):
            self._catch_up()  # what waits of a former run, which wanted none, is not this one's
        fusion = self._asked_for(request.feature_spec)
        first = request.features_from
        # Rows that are not sent are computed, too, where others may find their page.
        assert request.session_id not in self._wanted, "one of the same id is closed before"
        self._wanted[request.session_id] = _Wanted(
            request.feature_spec, fusion, first, 0 if self._store is not None else first
        )
        self._used[fusion] += 1
        space = f"{request.cache_salt}\0features {request.feature_spec:x}"
        if self._store is not None:
            self._store.open(request.session_id)
        else:  # a page without rows is of use to nobody else, nor to a drafter that begins anew
            space += f" {next(self._openings)}"
        return replace(request, cache_salt=space)

    @property
    def asked(self) -> bool:
        """True if a session wants features."""
        return bool(self._wanted)

    def close(self, session_id: int) -> None:
        """The session has ended, and its pages are home."""
        wanted = self._wanted.get(session_id)
        if wanted is None:
            return
        wanted.next = _ENDED
        self._catch_up()
        if self._store is not None:
            self._store.close(session_id)
        del self._wanted[session_id]
        self._used[wanted.fusion] -= 1
        if not self._used[wanted.fusion]:
            del self._used[wanted.fusion]

    def forget(self) -> None:
        """The weights have changed: what is kept for cached pages is no longer true. What was sent stays sent."""
        self._catch_up()
        if self._store is not None:
            self._store.forget()
            for wanted in self._wanted.values():
                wanted.fresh = 0

    # --- a step ---

    def capture(self, works: Sequence[SessionWork], *, late: bool = False) -> Capture | None:
        """The states of a step's rows that somebody wants; None if nobody does.

        late: no hints are wanted, and what is verified are drafts of the target's own
        """
        self._shares, self._late_first = {}, {}
        if not self._wanted:
            return None
        self._late = [work.chunk for work in works] if late else None
        if late:
            return self._capture_late(works)
        self._catch_up()
        chosen: dict[Fusion, list[int]] = {}
        behind = 0  # rows of works so far
        for work in works:
            chunk, first = work.chunk, behind
            behind += len(chunk) + len(work.draft.tokens)
            wanted = self._wanted.get(chunk.session.id)
            if wanted is None:
                continue
            known = min(max(0, wanted.fresh - chunk.start), len(chunk))  # rows that are computed again
            if first + known == behind:
                continue
            own = chosen.setdefault(wanted.fusion, [])
            self._shares[chunk.session.id] = _Share(wanted.fusion, chunk.start + known, len(own), len(chunk) - known)
            own += range(first + known, behind)
        if not chosen:
            return None
        self._counts = {fusion: len(rows) for fusion, rows in chosen.items()}
        fusion = next(iter(chosen)).layer if len(chosen) == 1 else None  # as in most steps
        return _capture(chosen, [row for rows in chosen.values() for row in rows], fusion)

    def _capture_late(self, works: Sequence[SessionWork]) -> Capture:
        """The states of all rows; mostly as many of them as in the step before."""
        rows = 0
        drafts = any(work.draft for work in works)
        for work in works:
            if drafts:
                self._late_first[work.chunk.session.id] = rows
            rows += len(work.chunk) + len(work.draft.tokens)
        fusions = set(self._used)
        if self._usual is None or self._usual[:2] != (fusions, rows):
            self._usual = fusions, rows, _capture(fusions, range(rows))
        return self._usual[2]

    def take(self, batch: Batch, states: Tensor | None) -> None:
        """What the forward pass captured. states: [F, W], None if nothing was wanted."""
        if batch.capture is None:
            return
        assert states is not None, "a runner hands back what a batch asks for"
        if self._late_first:
            self._late_states = states
            return
        if self._late is not None:
            for step, part in enumerate(states.split(len(batch))):  # those of a burst one behind the other
                chunks = [Chunk(c.session, c.start + step, c.stop + step) for c in self._late]
                self._unfused.append(_Unfused(chunks, batch.capture, part))
            self._unfused_rows += len(states)
            return
        if batch.capture.fusion is not None:
            (fusion,) = self._counts
            self._host = {fusion: states.view(torch.uint8)}
            return
        parts = states.split(list(self._counts.values()))
        for fusion, part in zip(self._counts, parts, strict=True):
            self._host[fusion] = fusion.apply(fusion.select(part, batch.capture)).to("cpu", non_blocking=True)
        if self._model.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def settle(self, work: SessionWork, path: Sequence[int], *, goes_on: bool) -> None:
        """Take over a session's committed rows. path: accepted nodes; goes_on: False if the session ends here."""
        session_id = work.chunk.session.id
        if not goes_on and session_id in self._wanted:
            self._wanted[session_id].next = _ENDED
        if session_id in self._late_first:
            self._settle_late(work, path, self._late_first[session_id])
        share = self._shares.pop(session_id, None)
        if share is None:
            return
        if self._arrived is not None:  # it came before the step's tokens did, if there were any
            self._arrived.synchronize()
            self._arrived = None
        behind = share.offset + share.committed
        rows = [*range(share.offset, behind), *(behind + node for node in path)]
        if rows:
            self._keep(session_id, share.position, self._host[share.fusion].numpy()[rows])

    def _settle_late(self, work: SessionWork, path: Sequence[int], first: int) -> None:
        """As `settle`, of a session whose states wait. first: where its rows begin."""
        chunk, usual, states = work.chunk, self._usual, self._late_states
        assert usual is not None, "captured before"
        assert states is not None, "taken before"
        behind = first + len(chunk)
        rows = [*range(first, behind), *(behind + node for node in path)]
        reach = Chunk(chunk.session, chunk.start, chunk.start + len(rows))
        self._unfused.append(_Unfused([reach], usual[2], states[rows]))
        self._unfused_rows += len(rows)

    def flush(self, *, late: bool = False) -> list[FeatureBlock]:
        """What is ready to be sent at a step's end, in order of position. late: no hints are wanted from here on."""
        self._host.clear()
        if not late or self._unfused_rows >= _MOST_UNFUSED or not all(fusion.fuses for fusion in self._used):
            self._catch_up()
        ready, self._ready = self._ready, []
        return ready

    def _catch_up(self) -> None:
        """Fuse the states of steps that wait."""
        if not self._unfused:
            return
        unfused, self._unfused, self._unfused_rows = self._unfused, [], 0
        found: dict[Fusion, dict[int, list[tuple[int, Tensor]]]] = {}
        for chunks, capture, states in unfused:
            for chunk, part in zip(chunks, states.split([len(chunk) for chunk in chunks]), strict=True):
                session_id = chunk.session.id
                if (wanted := self._wanted.get(session_id)) is not None:
                    own = wanted.fusion.select(part, capture)
                    found.setdefault(wanted.fusion, {}).setdefault(session_id, []).append((chunk.start, own))
        for fusion, parts in found.items():
            rows = fusion.apply(torch.cat([own for owned in parts.values() for _, own in owned])).cpu().numpy()
            for session_id, owned in parts.items():
                for first, count in _runs([(start, len(own)) for start, own in owned]):
                    self._keep(session_id, first, rows[:count])
                    rows = rows[count:]

    # --- where rows go ---

    def _keep(self, session_id: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Rows of committed tokens that a step has made. first: position of the first one."""
        if self._store is not None:
            self._store.add(session_id, first, rows)
        self._send(session_id, first, rows)

    def _lacks(self, session_id: int, end: int) -> bool:
        """True if a session has yet to send rows before a position."""
        return self._wanted[session_id].next < end

    def _send(self, session_id: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Rows of a step, or of a page that the session found in the prefix cache."""
        wanted = self._wanted[session_id]
        end = first + len(rows)
        wanted.fresh = max(wanted.fresh, end)
        if wanted.next < end:
            sent = max(0, wanted.next - first)
            self._ready.append(FeatureBlock(session_id, first + sent, rows[sent:], wanted.spec_id))
            wanted.next = end


def _capture(
    fusions: Collection[Fusion], rows: Sequence[int], layer: tuple[PackedWeight, Tensor | None] | None = None
) -> Capture:
    """What fusions need of rows of the batch. layer: what is made of the states at once."""
    layers = tuple(sorted({layer for fusion in fusions for layer in fusion.layers}))
    return Capture(layers, any(fusion.final for fusion in fusions), np.array(rows, np.int64), layer)


def _runs(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Parts that follow one another as one. parts: (first position, rows)."""
    runs: list[tuple[int, int]] = []
    for first, count in parts:
        if runs and sum(runs[-1]) == first:
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        else:
            runs.append((first, count))
    return runs
