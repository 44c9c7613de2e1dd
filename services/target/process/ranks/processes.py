"""The processes of ranks: those that rank 0 starts beside itself, and those of further machines.

A process that starts ranks holds a pipe to each; a rank ends when its pipe closes, however its parent ended. If a rank
ends by itself, the target ends, because no step can be computed without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from outrider.config import TargetConfig, to_argv
from outrider.config.ranks import check_ranks, rank_places
from outrider.process.python_command import python_command
from services.target.model.base import Model
from services.target.model.loading.shards import check_devices
from services.target.process.ranks import group
from services.target.process.ranks.channel import Channel, Kind
from services.target.process.ranks.leading import LeadingRunner
from services.target.process.ranks.loading import load_part
from services.target.process.ranks.machines import MachineWatch
from services.target.process.ranks.updates import slotted

log = logging.getLogger(__name__)

_WORKER_MODULE = "services.target.process.ranks.worker"
EXIT_SECONDS = 5.0  # seconds that a rank has to end

OnDeath = Callable[[str], None]


class LeadingRank:
    """Rank 0's own part in starting and ending all ranks."""

    def __init__(self, folder: Path, config: TargetConfig, on_death: OnDeath) -> None:
        """Start the other ranks of this machine. on_death: as of `load_split`."""
        places = rank_places(config)
        self._store = group.host(folder, config)
        address = config.dist_init_addr or f"{group.HOST}:{self._store.port}"
        self.processes = RankProcesses(places.here[1:], address, folder, config, on_death)
        self._machines = MachineWatch(address, config, on_death) if config.nnodes > 1 else None
        self._channel: Channel | None = None

    def load(self, folder: Path, config: TargetConfig) -> Model:
        """Join the ranks and load this one's part. Returns the model that computes on all of them."""
        here = dataclasses.replace(config, device=rank_places(config).device(0))
        self._channel = group.join(self._store, 0, here)
        model = load_part(folder, here)
        return dataclasses.replace(model, runner=LeadingRunner(slotted(model.runner), self._channel, model.device))

    def stop(self) -> None:
        """End all ranks. No step may be in progress."""
        self.processes.stopping.set()
        if self._machines is not None:
            self._machines.stop()
        if self._channel is not None:
            with contextlib.suppress(RuntimeError):  # of a rank that has ended
                self._channel.send(Kind.END)
                if self._machines is not None:
                    self._machines.wait_for_others(EXIT_SECONDS)
        self.processes.stop()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def load_split(folder: Path, config: TargetConfig, on_death: OnDeath) -> tuple[Model, LeadingRank]:
    """Start the ranks and load a model divided among them. Raises ConfigError.

    on_death: called in a separate thread, with the reason, if a rank ends before `LeadingRank.stop`
    """
    check_ranks(config)
    check_devices(rank_places(config).devices)
    leading = LeadingRank(folder, config, on_death)
    try:
        return leading.load(folder, config), leading
    except BaseException:
        leading.stop()
        raise


class RankProcesses:
    """Processes of ranks on this machine. stopping: their end is wanted."""

    def __init__(
        self, ranks: Sequence[int], address: str, folder: Path, config: TargetConfig, on_death: OnDeath
    ) -> None:
        """address: of rank 0's store."""
        self.stopping = threading.Event()
        self._size, self._on_death = config.tp_size, on_death
        environment = os.environ | {"OMP_NUM_THREADS": str(group.threads(config))}
        places = rank_places(config)
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in ranks:
            own = dataclasses.replace(config, model_path=str(folder), device=places.device(rank))
            command = python_command("-m", _WORKER_MODULE, str(rank), address, *to_argv(own))
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
            self.processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def codes(self, seconds: float) -> list[int]:
        """The exit codes of those that end by themselves within a time."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [process.returncode for process in self.processes if process.returncode is not None]

    def stop(self) -> None:
        """End them."""
        self.stopping.set()
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self.stopping.is_set():
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._on_death(f"rank {rank} of {self._size} {how}; the target cannot go on without it")
