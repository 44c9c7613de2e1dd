"""Numbers of replicas that start independently on one machine, such as containers: each takes one that no other has.

A number is a locked file in the cache folder, which the containers of a machine share. The kernel unlocks it when the
process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from outrider.checkpoints.conversion import cache_folder

log = logging.getLogger(__name__)

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine, and on no other machine
_MOST = 1024
_claimed: dict[str, int] = {}  # by service, for this process; the files stay open


def claim_number(service: str) -> int:
    """The number of this process among those of its service on this machine, from 0; 0 where no file can be locked.

    Replicas that share no cache folder are not seen.
    """
    if service not in _claimed:
        _claimed[service] = _claim(service)
    return _claimed[service]


def _claim(service: str) -> int:
    try:
        folder = cache_folder() / "replicas" / _BOOT.read_text(encoding="ascii").strip()
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(_MOST):
            file = os.open(folder / f"{service}-{number}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return number
            except BlockingIOError:
                os.close(file)
    except OSError as error:
        log.debug("replicas of this machine are not counted: %s", error)
    return 0
