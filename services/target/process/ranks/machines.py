"""Several machines: the further ones compute ranks and serve nothing, and each side notices when the other is gone.

    machine 0       the engine with rank 0, and its other ranks; hosts the store at --dist-init-addr
    machine 1, ...  `outrider target` with the same flags and its own --node-rank: its ranks, until they end

The collectives of a step notice a dead process at once, but neither a network that is cut nor a machine that is idle.
So every machine counts up in the store, and one whose count stands still is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from outrider.config import TargetConfig
from services.target.process.ranks import group

log = logging.getLogger(__name__)

_BEAT_SECONDS = 2.0
SILENT_SECONDS = 30.0  # after which a machine is gone


class MachineWatch:
    """Counts up in the store for this machine, and watches the counts of others."""

    def __init__(
        self, address: str, config: TargetConfig, on_death: Callable[[str], None], silent: float = SILENT_SECONDS
    ) -> None:
        """address: of rank 0's store. on_death: called in a separate thread, with the reason.

        Machine 0 watches all others; these watch machine 0.
        """
        self._address, self._config, self._on_death, self._silent = address, config, on_death, silent
        self._stopping = threading.Event()
        threading.Thread(target=self._run, name="machines", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopping.set()

    def leave(self) -> None:
        """Report to machine 0 that this one's ranks have ended in order."""
        group.connect(self._address).set(_left(self._config.node_rank), "")

    def wait_for_others(self, seconds: float) -> None:
        """On machine 0: wait until the others have left, because the store ends with this process."""
        keys = [_left(machine) for machine in range(1, self._config.nnodes)]
        group.connect(self._address).wait(keys, timedelta(seconds=seconds))

    def _run(self) -> None:
        own, others = self._config.node_rank, range(1, self._config.nnodes)
        watched = others if own == 0 else [0]
        lost = watched[0]
        try:
            store = group.connect(self._address)
            store.set_timeout(timedelta(seconds=self._silent))
            lost = self._watch(store, own, watched)
        except Exception as error:  # the store is on machine 0
            log.debug("the store of machine 0: %s", error)
            lost = 0
        if not self._stopping.is_set():
            machine = f"machine {lost} of {self._config.nnodes}"
            self._on_death(f"{machine} does not answer; the target cannot go on without it")

    def _watch(self, store: dist.Store, own: int, watched: Sequence[int]) -> int:
        """Returns the machine that is gone, or any when watching is stopped."""
        seen = {machine: (0, time.monotonic()) for machine in watched}
        while not self._stopping.wait(_BEAT_SECONDS):
            store.add(_key(own), 1)
            for machine, (before, since) in seen.items():
                count = store.add(_key(machine), 0)
                if count != before or count == 0:  # 0: it has not joined yet
                    seen[machine] = (count, time.monotonic())
                elif time.monotonic() - since > self._silent:
                    return machine
        return own


def _key(machine: int) -> str:
    return f"outrider/beat/{machine}"


def _left(machine: int) -> str:
    return f"outrider/left/{machine}"
