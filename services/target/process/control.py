"""Control of a running target, between two steps: weight updates, cache flushes, pauses.

    update      cached prefixes and KV of the old weights are dropped; sessions are computed again and continue with the
                new weights, unless they are aborted or keep their cache
    flush       only while no session runs
    pause       no steps; sessions end, give their pages back, or keep them

Weights that do not fit, or cannot be read, are rejected before anything changes. An error during the update, such as a
disk error, leaves a mixture of old and new weights: then the process ends and restarts with the weights of its flags.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outrider.checkpoints import checkpoint
from outrider.errors import ConfigError, EngineFault, InvalidRequest
from services.target.engine.engine import TargetEngine
from services.target.model.loading.updates import (
    CheckpointFolder,
    IncomingTensors,
    WeightsOrigin,
    by_own_names,
    check,
    tied_names,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """Options of a weight update. weight_version: the new label; None keeps the old one."""

    weight_version: str | None = None
    keep_cache: bool = False
    abort_all_requests: bool = False


@dataclass(frozen=True)
class Weights:
    """The current weights and the result of the last update. Fields as in the wire's WeightFacts."""

    weight_version: str
    fingerprint: str
    replaced: int = 0
    aborted: int = 0
    retracted: int = 0
    before: str = ""
    whole: bool = False


class Control:
    """Control of one engine. Methods marked "in the engine thread" must run there; the others change nothing."""

    def __init__(self, engine: TargetEngine, folder: Path, *, trust_remote_code: bool = False) -> None:
        """folder: the engine's checkpoint. Its headers are read now, because it may be deleted later."""
        loaded = CheckpointFolder(folder, trust_remote_code)
        self._engine = engine
        self._trust_remote_code = trust_remote_code
        self._settings = loaded.settings
        self._shapes = dict(engine.model.runner.weights())
        self._tied = tied_names(self._settings, self._shapes)
        self._ignored = frozenset(loaded.entries.keys() - self._shapes.keys() - self._tied.keys())
        self._origin = WeightsOrigin(loaded.fingerprint)
        self.weights = Weights(engine.weight_version, self._origin.folder)

    # --- weights ---

    def read_folder(self, path: str) -> CheckpointFolder:
        """Open a folder's checkpoint and check it against the model. Raises ConfigError."""
        try:
            folder = CheckpointFolder(checkpoint.resolve(path), self._trust_remote_code)
        except OSError as error:
            raise ConfigError(f"the weights in {path} cannot be read: {error}") from None
        folder.check_settings(self._settings)
        names = by_own_names(folder.entries, self._tied)
        check({own: folder.entries[name] for own, name in names.items()}, self._shapes, self._ignored, whole=True)
        folder.check_tied(self._tied)
        return folder

    def incoming(self) -> IncomingTensors:
        """A buffer for tensors that arrive in parts."""
        return IncomingTensors(self._shapes, self._tied)

    def update_from_folder(self, folder: CheckpointFolder, update: Update) -> Weights:
        """In the engine thread: load a checked folder's weights. Raises EngineFault, and ConfigError if the folder was
        deleted meanwhile.
        """
        names = by_own_names(folder.entries, self._tied)
        wanted = {own: name for own, name in names.items() if own in self._shapes}
        return self._update(folder.tensors(wanted), WeightsOrigin(folder.fingerprint), update, whole=True)

    def update_from_tensors(self, incoming: IncomingTensors, update: Update) -> Weights:
        """In the engine thread: load checked tensors. Raises EngineFault."""
        origin = self._origin.under(incoming.digests)
        whole = self.weights.whole or origin.covered(self._shapes)
        return self._update([incoming.tensors()], origin, update, whole=whole)

    def _update(
        self, shards: Iterable[Mapping[str, Tensor]], origin: WeightsOrigin, update: Update, *, whole: bool
    ) -> Weights:
        engine, start, replaced = self._engine, time.perf_counter(), 0
        engine.finish()
        aborted = engine.abort() if update.abort_all_requests else 0
        retracted = 0
        if not update.keep_cache:
            engine.flush()  # first, so that sessions share only prefixes computed with the new weights
            retracted = engine.scheduler.retract()
            for session in engine.scheduler:
                session.score_anew()
        begun = False
        try:
            for tensors in shards:
                begun = True
                engine.model.runner.update(tensors)
                replaced += len(tensors)
        except Exception as error:
            if not begun:
                raise ConfigError(f"the weights cannot be read, so nothing has changed: {error}") from error
            raise EngineFault(f"the weights are changed in part, so the target restarts: {error}") from error
        if update.weight_version is not None:
            engine.weight_version = update.weight_version
        before, self._origin = self.weights.fingerprint, origin
        self.weights = Weights(
            engine.weight_version, origin.fingerprint(self._shapes), replaced, aborted, retracted, before, whole
        )
        log.info(
            "weights \"%s\": %d tensors replaced in %.2f s; %d sessions aborted, %d computed again",
            engine.weight_version, replaced, time.perf_counter() - start, aborted, retracted,
        )  # fmt: skip
        return self.weights

    # --- cache and pauses, in the engine thread ---

    def flush_cache(self) -> None:
        """Drop cached prefixes. Raises InvalidRequest while sessions run, or could at any moment."""
        self._engine.finish()
        scheduler = self._engine.scheduler
        if scheduler.running or (len(scheduler) and not scheduler.held):
            raise InvalidRequest(
                f"the cache cannot be flushed while {len(scheduler)} requests are under way; "
                "pause with mode abort or retract, or try again later"
            )
        self._engine.flush()

    def pause(self, mode: str) -> int:
        """Stop taking steps. mode: abort, retract or in_place. Returns the number of aborted sessions."""
        modes: dict[str, Callable[[], int]] = {
            "abort": self._engine.abort,
            "retract": self._engine.scheduler.retract,
            "in_place": lambda: 0,
        }
        self._engine.finish()
        count = modes[mode]()
        self._engine.scheduler.held = True
        log.info("paused: %s", mode)
        return count if mode == "abort" else 0

    def proceed(self) -> None:
        """Take steps again."""
        self._engine.scheduler.held = False
        log.info("resumed")
