"""A fed drafter that learns from the sessions that it serves.

It asks the target for the states themselves, unfused, and for the last one as well: then what is learnt is what
`outrider train` learns, and a new fusion needs no word to anybody. For EAGLE-3 that is four widths of the target a
token on the wire instead of one of the draft; EAGLE is fed with that last state anyway.

    rows of the target ──┬──► recording (ring.py) ──► learner, in a thread of its own
                         └──► fused here ──► trunk         │
    before a step: what was offered is installed ◄─────────┘

At a swap keys and values of the old weights stay where sessions have them: they are hints of hints, and go with their
sessions. Cached prefixes are forgotten, so that nobody begins with them.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureBlock, FeatureFormat, FeatureSpec, decode, row_bytes
from outrider.serving.messages import EngineLoad
from outrider.telemetry import Progress, no_progress
from services.draft.drafters.feature import FeatureDrafter
from services.draft.model.programs.runner import ModelRunner
from services.draft.online.background import Background
from services.draft.online.learner import Learner
from services.draft.online.ring import RecordedRows, Recording, Ring
from services.draft.sessions.session import DraftSession


class OnlineDrafter(FeatureDrafter):
    """A fed drafter whose weights change. swaps: how often they did."""

    def __init__(
        self, name: str, runner: ModelRunner, prefix: PrefixCache, max_running: int, chunk: int, features: FeatureSpec,
        learner: Learner, ring: Ring, share: float,
    ) -> None:  # fmt: skip
        """features: all states that are learnt from, the last one behind the others. share: of the time, to learn."""
        super().__init__(name, runner, prefix, max_running, chunk, features)
        self._row_bytes = row_bytes(ring.row_bytes // 2, features.format)
        self.learner, self._ring = learner, ring
        self._background = Background(learner.turn, share)
        self._recordings: dict[int, Recording] = {}
        self._ended: dict[int, tuple[Recording, NDArray[np.uint32]]] = {}  # whose last rows may come yet; all tokens
        self.swaps = 0

    def warm_up(self, tell: Progress = no_progress) -> None:
        """Learn once for nothing, so that nothing is compiled later; then as any drafter."""
        tell(1, 1 + len(self.shapes))
        self.learner.warm_up()
        super().warm_up(lambda part, parts: tell(1 + part, 1 + parts))

    def start(self) -> None:
        """Begin to learn."""
        self._background.start()

    def stop(self) -> None:
        """Learn no more."""
        self._background.stop()

    # --- sessions ---

    def open(self, session: DraftSession) -> None:
        """As any drafter; and record what comes, unless the session is to share nothing with others."""
        super().open(session)
        if session.cache_salt:
            return
        recording = self._ring.begin(session.sampling.temperature, session.prompt_length)
        self._recordings[session.id] = recording

        def hear(first: int, rows: NDArray[np.uint8]) -> None:
            self._record(recording, first, rows, session.tokens)

        session.features = RecordedRows(session.features, hear)

    def _record(self, recording: Recording, first: int, rows: NDArray[np.uint8], tokens: NDArray[np.uint32]) -> None:
        if rows.shape[1] == self._row_bytes:  # others end the session soon
            recording.add(first, _narrow(rows, self.features.format), tokens)

    def ended(self, session: DraftSession, tokens: NDArray[np.uint32]) -> None:
        """Its recording is over with the next round: what gathers while no hints are wanted comes with the end."""
        if (recording := self._recordings.pop(session.id, None)) is not None:
            self._ended[session.id] = recording, np.concatenate([session.tokens, tokens])

    def overtaken(self, block: FeatureBlock) -> None:
        """Record what comes with a session's end."""
        if (last := self._ended.get(block.session_id)) is not None:
            recording, tokens = last
            self._record(recording, block.first, block.rows, tokens)

    def close(self, session: DraftSession) -> None:
        """As any drafter; the recording is over."""
        if (recording := self._recordings.pop(session.id, None)) is not None:
            recording.finish(session.tokens)
        super().close(session)

    def flush(self) -> None:
        """As any drafter; and learn from nothing that came so far: the target may have other weights now."""
        super().flush()
        for recording in (*self._recordings.values(), *(recording for recording, _ in self._ended.values())):
            recording.drop()
        self._ended.clear()
        self._ring.forget()

    def features_of(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """All states but the last, which is there to be learnt from."""
        return decode(rows, self.features.format)[:, : self.runner.feature_width]

    # --- between two rounds ---

    @property
    def busy(self) -> bool:
        """True if recordings are to be handed over."""
        return bool(self._ended) or super().busy

    def work(self) -> None:
        """Hand over the recordings of sessions that have ended, and take over new weights, if there are any."""
        for recording, tokens in self._ended.values():
            recording.finish(tokens)
        self._ended.clear()
        if (served := self.learner.offer.take()) is not None:
            self.runner.install(*served)
            self.prefix.flush()
            self.swaps += 1

    def load(self) -> EngineLoad:
        """As any drafter; and what was learnt."""
        return replace(super().load(), online=self.learner.load())


def _narrow(rows: NDArray[np.uint8], layout: FeatureFormat) -> NDArray[np.uint8]:
    """Rows in bfloat16."""
    if layout is FeatureFormat.BFLOAT16:
        return rows
    return decode(rows, layout).astype(ml_dtypes.bfloat16).view(np.uint8)
