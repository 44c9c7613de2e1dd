"""Control of a running target, between two steps: weight updates, cache flushes, pauses.

    update      cached prefixes and KV of the old weights are dropped; sessions are computed again and continue with the
                new weights, unless they are aborted or keep their cache
    flush       only while no session runs
    pause       no steps; sessions end, give their pages back, or keep them

Weights that do not fit, or cannot be read, are rejected before anything changes. An error during the update, such as a
disk error, leaves a mixture of old and new weights: then the process ends and restarts with the weights of its flags,
and the gateway lets it load those that it had before, if they came from a folder. Tensor-parallel ranks receive all
weights before any is replaced: an error on one of them leaves the old ones everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from safetensors import SafetensorError
from torch import Tensor

from outrider.checkpoints.allowed_folders import AllowedFolders
from outrider.checkpoints.dequantize import BESIDE, INSTEAD
from outrider.errors import ConfigError, Conflict, EngineFault, InvalidRequest
from services.target.engine.engine import TargetEngine
from services.target.model.loading.settings import RunningSettings
from services.target.model.loading.updates import (
    DTYPES,
    CheckpointFolder,
    FolderTensors,
    IncomingTensors,
    WeightsOrigin,
    by_own_names,
    check,
    check_numbers,
    tied_names,
)
from services.target.process.weights.groups import TrainerGroups
from services.target.process.weights.incoming import IncomingPickle, max_update_bytes
from services.target.process.weights.shared import SharedWeights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """Options of a weight update. weight_version: the new label; None keeps the old one. shared: names of drafts."""

    weight_version: str | None = None
    keep_cache: bool = False
    abort_all_requests: bool = False
    shared: tuple[str, ...] = ()


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
    folder: str = ""


class ArrivedTensors(Protocol):
    """Tensors that fit the model, by its names, and their digests."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """On the host."""

    @property
    def digests(self) -> Mapping[str, bytes]:
        """As of WeightsOrigin."""


@runtime_checkable
class LeadsRanks(Protocol):
    """A runner of several tensor-parallel ranks."""

    def tell_groups(self, message: bytes) -> None:
        """Send what a trainer's group does to the other ranks."""


@dataclass(frozen=True)
class Condition:
    """What must hold for an update from a folder, as the wire's request has it; an empty field demands nothing."""

    fingerprint: str = ""
    replaced_fingerprint: str = ""


class Control:
    """Control of one engine. Methods marked "in the engine thread" must run there; the others change nothing."""

    def __init__(
        self,
        engine: TargetEngine,
        folder: Path,
        *,
        model_path: str = "",
        roots: Sequence[str] = (),
        trust_remote_code: bool = False,
        group_timeout: float = 300.0,
    ) -> None:
        """folder: the engine's checkpoint. Its headers are read now, because it may be deleted later.

        model_path, roots: as of AllowedFolders. trust_remote_code: for the configuration of this folder alone; folders
        of updates have no code. group_timeout: as of TrainerGroup
        """
        loaded = CheckpointFolder(folder)
        self._engine = engine
        self._allowed = AllowedFolders(model_path, folder, roots)
        self._settings = RunningSettings(folder, trust_remote_code)
        self._shapes = dict(engine.model.runner.weights())
        self._tied = tied_names(self._shapes, tied=self._settings.ties_embeddings)
        self._ignored = frozenset(loaded.entries.keys() - self._shapes.keys() - self._tied.keys())
        floats = (*DTYPES, "F8_E4M3")  # a trainer sends weights wider than they are stored
        parts = (*INSTEAD, *BESIDE)  # of a quantized weight
        beside = {name: loaded.entries[name] for name in self._ignored if name.rpartition(".")[2] not in parts}
        # Such as MTP layers, which drafts share.
        wider = {name: entry.shape for name, entry in beside.items() if entry.dtype in floats}
        self._accepted = wider | self._shapes if self._shapes else {}
        self._origin = WeightsOrigin(loaded.fingerprint)
        self._dtype = engine.model.dtype
        self.shared = SharedWeights(self._tied)
        self._receiving = threading.Lock()
        self._paused = self._released = False
        self.groups = TrainerGroups(self._accepted, self._tied, engine.model.device, group_timeout, _sender_of(engine))
        self.weights = Weights(engine.weight_version, self._origin.folder)

    # --- weights ---

    def _check_plain(self) -> None:
        """Raise ConfigError for weights that no others can take the place of."""
        if (kinds := self._engine.model.kinds) and not self._shapes:
            raise ConfigError(
                f"the weights keep the number formats of their file ({', '.join(sorted(kinds))}) and cannot be "
                "replaced; start the target with --dtype bfloat16 or --quantization int8"
            )

    def read_folder(self, path: str, condition: Condition | None = None) -> CheckpointFolder:
        """Open a folder's checkpoint and check it against the model. Raises ConfigError."""
        self._check_plain()
        found = self._allowed.find(path)
        try:
            folder = CheckpointFolder(found)
        except OSError as error:
            raise ConfigError(f"the weights in {found} cannot be read: {error}") from None
        if condition is not None and condition.fingerprint not in ("", folder.fingerprint):
            raise ConfigError(
                f"{found} has other weights by now, fingerprint {folder.fingerprint} instead of {condition.fingerprint}"
            )
        self._settings.check(folder.config, found)
        names = by_own_names(folder.entries, self._tied)
        check({own: folder.entries[name] for own, name in names.items()}, self._shapes, self._ignored, whole=True)
        own = {own: name for own, name in names.items() if own in self._shapes}
        try:
            folder.check_tied(self._tied)
            check_numbers(folder.tensors(own), self._dtype)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"the weights in {found} cannot be read: {error}") from None
        return folder

    def check_numbers(self, arrived: ArrivedTensors) -> None:
        """Raise ConfigError for tensors with NaN or infinity, in a thread of its own, because it reads all of them."""
        check_numbers(arrived.tensors, self._dtype)

    @property
    def max_update_bytes(self) -> int:
        """Largest content of an update from tensors, in bytes."""
        return max_update_bytes(self._accepted, self._tied)

    @contextlib.contextmanager
    def incoming(self, *, pickled: bool = False) -> Iterator[IncomingTensors | IncomingPickle]:
        """A buffer for tensors that arrive in parts; one at a time, because it takes as much memory as the model.

        pickled: as a pickle, else as a safetensors file. Raises Conflict while there is another one, and ConfigError
        for weights that are not replaced.
        """
        with self.exclusively():
            if pickled:
                yield IncomingPickle(self._accepted, self._tied, cuda=self._engine.model.device.type == "cuda")
            else:
                yield IncomingTensors(self._accepted, self._tied)

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """While tensors arrive. Raises as `incoming`."""
        self._check_plain()
        if not self._receiving.acquire(blocking=False):
            raise Conflict("tensors of another update are being received; send these once it has ended")
        try:
            yield
        finally:
            self._receiving.release()

    def update_from_folder(
        self, folder: CheckpointFolder, update: Update, condition: Condition | None = None
    ) -> Weights:
        """In the engine thread: load a checked folder's weights. Raises EngineFault, and ConfigError if the folder was
        deleted meanwhile, or if the condition does not hold.
        """
        present = self.weights.fingerprint
        if condition is not None and condition.replaced_fingerprint not in ("", present):
            raise ConfigError(f"the weights were changed meanwhile; their fingerprint is {present}")
        names = by_own_names(folder.entries, self._tied)
        wanted = {own: name for own, name in names.items() if own in self._shapes}
        origin = WeightsOrigin(folder.fingerprint)
        weights = self._update(folder.tensors(wanted), origin, update, whole=True, folder=str(folder.path))
        self.shared.took_folder(folder)
        return weights

    def update_from_tensors(self, arrived: ArrivedTensors, update: Update) -> Weights:
        """In the engine thread: load checked tensors. Raises EngineFault.

        Those that the model does not have are of its checkpoint: they are for drafts, and texts do not depend on them.
        """
        own = {name: tensor for name, tensor in arrived.tensors.items() if name in self._shapes}
        origin = self._origin.under({name: arrived.digests[name] for name in own})
        whole = self.weights.whole or origin.covered(self._shapes)
        copies = self.shared.copies(arrived.tensors, update.shared)  # before anything changes: memory may be short
        weights = self._update(own, origin, update, whole=whole)
        self.shared.took_tensors(copies, arrived.digests)
        return weights

    def _update(
        self,
        tensors: Mapping[str, Tensor],
        origin: WeightsOrigin,
        update: Update,
        *,
        whole: bool,
        folder: str = "",
    ) -> Weights:
        engine, start = self._engine, time.perf_counter()
        engine.finish()
        aborted = engine.abort() if update.abort_all_requests else 0
        retracted = 0
        if not update.keep_cache:
            engine.flush()  # first, so that sessions share only prefixes computed with the new weights
            retracted = engine.scheduler.retract()
            for session in engine.scheduler:
                session.score_anew()
        try:
            engine.model.runner.update(tensors)
        except ConfigError:
            raise
        except Exception as error:
            if isinstance(tensors, FolderTensors) and not tensors.begun:
                raise ConfigError(f"the weights cannot be read, so nothing has changed: {error}") from error
            raise EngineFault(f"the weights are changed in part, so the target restarts: {error}") from error
        if update.weight_version is not None:
            engine.weight_version = update.weight_version
        before, self._origin = self.weights.fingerprint, origin
        self.weights = Weights(
            engine.weight_version,
            origin.fingerprint(self._shapes),
            len(tensors),
            aborted,
            retracted,
            before,
            whole,
            folder,
        )
        log.info(
            "weights \"%s\": %d tensors replaced in %.2f s; %d sessions aborted, %d computed again",
            engine.weight_version, len(tensors), time.perf_counter() - start, aborted, retracted,
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
        self._engine.scheduler.held = self._paused = True
        log.info("paused: %s", mode)
        return count if mode == "abort" else 0

    def proceed(self) -> None:
        """Take steps again, unless memory is released."""
        self._paused = False
        self._engine.scheduler.held = self._released
        log.info("resumed")

    def release(self) -> int:
        """Return the memory of the KV cache to the system. Returns its size, in bytes. Raises ConfigError.

        Sessions give their pages back, and wait for `resume`.
        """
        engine = self._engine
        if engine.model.device.type != "cpu" or isinstance(engine.model.runner, LeadsRanks):
            raise ConfigError(
                "a target on a GPU, or with --tp-size, keeps its memory; train on other devices, or stop it meanwhile"
            )
        engine.finish()
        engine.scheduler.held = self._released = True
        engine.scheduler.retract()
        engine.flush()
        size = engine.cache.release()
        log.info("released %d bytes of the KV cache", size)
        return size

    def resume(self) -> None:
        """Take memory again, as it is needed."""
        self._released = False
        self._engine.scheduler.held = self._paused
        log.info("the KV cache may take memory again")


def _sender_of(engine: TargetEngine) -> Callable[[bytes], None] | None:
    """Sends what a trainer's group does to the other tensor-parallel ranks; None without any."""
    runner = engine.model.runner
    return runner.tell_groups if isinstance(runner, LeadsRanks) else None
