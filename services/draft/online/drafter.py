"""A feature-based drafter that is trained on the sessions that it serves.

It requests the target's states themselves, unfused, and the last state as well: then the training is that of `outrider
train`, and a new fusion layer stays inside the draft service. For EAGLE-3 the wire carries four hidden sizes of the
target a token instead of one of the draft; EAGLE reads the last state anyway.

    rows of the target ──┬──► recording (recording.py) ──► learner, in a thread of its own
                         └──► fusion ──► prefix KV                 │
    before a step: the offered weights are installed ◄─────────────┘

At a swap, sessions keep the keys and values of the old weights; they only affect draft tokens, and disappear with their
sessions. Cached prefixes are dropped, so that no new session starts with them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureBlock, FeatureFormat, FeatureSpec, decode, row_bytes
from outrider.serving.messages import EngineLoad, own_salt
from outrider.telemetry import Progress, no_progress
from services.draft.drafters.feature import FeatureDrafter
from services.draft.model.programs.runner import ModelRunner
from services.draft.online.background import Background
from services.draft.online.learner import Learner
from services.draft.online.recording import RecordedFeatures, SessionRecording
from services.draft.online.replay_buffer import ReplayBuffer
from services.draft.sessions.session import DraftSession


class OnlineDrafter(FeatureDrafter):
    """A feature-based drafter whose weights change. swaps: number of times that new weights were installed."""

    def __init__(
        self, name: str, runner: ModelRunner, prefix: PrefixCache, max_running: int, chunk: int, features: FeatureSpec,
        learner: Learner, buffer: ReplayBuffer, share: float,
    ) -> None:  # fmt: skip
        """features: the states to train on, with the last state behind the others. share: of the time, for training."""
        super().__init__(name, runner, prefix, max_running, chunk, features)
        self.received_row_bytes = row_bytes(buffer.row_bytes // 2, features.format)
        self.learner, self._buffer = learner, buffer
        self._background = Background(learner.run_once, share)
        self._recordings: dict[int, tuple[SessionRecording, DraftSession]] = {}
        self._ended: dict[
            int, tuple[SessionRecording, NDArray[np.uint32]]
        ] = {}  # last rows may follow; with all tokens
        self.swaps = 0

    def warm_up(self, report: Progress = no_progress) -> None:
        """Run a training step, so that nothing is compiled later; then as ModelDrafter."""
        report(1, 1 + len(self.shapes))
        self.learner.warm_up()
        super().warm_up(lambda part, parts: report(1 + part, 1 + parts))

    def start(self) -> None:
        """Start the training thread."""
        self._background.start()

    def stop(self) -> None:
        """End the training thread, and store the state of the training."""
        self._background.stop()
        self.learner.save()

    # --- sessions ---

    def open(self, session: DraftSession) -> None:
        """As ModelDrafter; also record the session, unless its client isolates it with a cache salt."""
        super().open(session)
        if own_salt(session.cache_salt):
            return
        recording = SessionRecording(self._buffer, session.sampling.temperature, session.prompt_length)
        self._recordings[session.id] = recording, session

        def on_rows(first: int, rows: NDArray[np.uint8]) -> None:
            self._record(recording, first, rows, session.tokens)

        session.features = RecordedFeatures(session.features, on_rows)

    def _record(
        self, recording: SessionRecording, first: int, rows: NDArray[np.uint8], tokens: NDArray[np.uint32]
    ) -> None:
        if rows.shape[1] == self.received_row_bytes:  # other widths end the session soon
            recording.add(first, _as_bfloat16(rows, self.features.format), tokens)

    def finished(self, session: DraftSession, tokens: NDArray[np.uint32]) -> None:
        """Finish its recording with the next round; while drafting is paused, states arrive with the end."""
        if (found := self._recordings.pop(session.id, None)) is not None:
            self._ended[session.id] = found[0], np.concatenate([session.tokens, tokens])

    def late_features(self, block: FeatureBlock) -> None:
        """Record states that arrive with a session's end."""
        if (last := self._ended.get(block.session_id)) is not None:
            recording, tokens = last
            self._record(recording, block.first, block.rows, tokens)

    def close(self, session: DraftSession) -> None:
        """As ModelDrafter; the recording is finished."""
        if (found := self._recordings.pop(session.id, None)) is not None:
            found[0].finish(session.tokens)
        super().close(session)

    def outdate(self) -> None:
        """The target has other weights: recordings end with the states of the old ones, which are used for a while."""
        super().outdate()
        for recording, session in self._recordings.values():
            recording.finish(session.tokens)
        self._store_ended()
        self._buffer.outdate()

    def features_of(self, rows: NDArray[np.uint8]) -> NDArray[Any]:
        """All states but the last, which is only a training target."""
        return super().features_of(rows)[:, : self.runner.feature_width]

    # --- between two rounds ---

    @property
    def busy(self) -> bool:
        """True if finished recordings wait to be stored."""
        return bool(self._ended) or super().busy

    def work(self) -> None:
        """Store the recordings of ended sessions, and install new weights if there are any."""
        self._store_ended()
        if (served := self.learner.offer.take()) is not None:
            self.runner.install(*served)
            self.prefix.flush()
            self.swaps += 1

    def _store_ended(self) -> None:
        for recording, tokens in self._ended.values():
            recording.finish(tokens)
        self._ended.clear()

    def load(self) -> EngineLoad:
        """As ModelDrafter, with the counts of the training."""
        return replace(super().load(), online=self.learner.load())


def _as_bfloat16(rows: NDArray[np.uint8], layout: FeatureFormat) -> NDArray[np.uint8]:
    """Rows converted to bfloat16."""
    if layout is FeatureFormat.BFLOAT16:
        return rows
    return decode(rows, layout).astype(ml_dtypes.bfloat16).view(np.uint8)
