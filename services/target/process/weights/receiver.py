"""A member of a trainer's group over gloo, in a process beside the target: a message of the trainer may end it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from outrider.process.python_command import python_command
from services.target.process.weights.member import Membership, silence
from services.target.process.weights.receiver_process import MESSAGE_BYTES, mapped

log = logging.getLogger(__name__)

_MODULE = "services.target.process.weights.receiver_process"
_START_SECONDS = 120.0  # for the process to start, on a busy machine
_ANSWER_SECONDS = 10.0  # beyond the time that the process itself waits
_EXIT_SECONDS = 5.0
_TOO_LONG = re.compile(r"([0-9]+) vs ([0-9]+)\. Received data size")  # of gloo
_LOG_BYTES = 2000  # of the end of what the process has written


class ReceivingProcess:
    """A process that is a member. Errors are RuntimeError, OSError and TimeoutError."""

    def __init__(self, membership: Membership, timeout: float) -> None:
        """Start it, and join. timeout: as of Member."""
        self._timeout = timeout
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._link, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                python_command("-m", _MODULE, str(there.fileno())),
                stdin=subprocess.DEVNULL,
                stderr=self._output,
                pass_fds=[there.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        try:
            self._ask({"membership": asdict(membership), "timeout": timeout}, _START_SECONDS)
        except BaseException:
            self.leave()
            raise

    def receive(self, size: int, end: bytes = b"") -> Tensor:
        """What rank 0 broadcasts, [size] uint8. end: the last bytes of it, unless the message reaches them."""
        file = os.memfd_create("weights")
        try:
            os.ftruncate(file, size)
            os.pwrite(file, end, size - len(end))
            self._ask({"bytes": size}, _ANSWER_SECONDS, [file])
            return mapped(file, size)
        finally:
            os.close(file)

    def leave(self) -> None:
        """End the process."""
        self._link.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _ask(self, request: Mapping[str, Any], seconds: float, files: Sequence[int] = ()) -> None:
        """seconds: beyond the timeout."""
        self._link.settimeout(self._timeout + seconds)
        try:
            socket.send_fds(self._link, [json.dumps(request).encode()], files)
            answer = self._link.recv(MESSAGE_BYTES)
        except TimeoutError:
            raise TimeoutError(silence(self._timeout)) from None
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if not answer:
            raise RuntimeError(self._why_it_ended())
        if error := json.loads(answer).get("error"):
            raise RuntimeError(error)

    def _why_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _LOG_BYTES))
        text = self._output.read().decode(errors="replace")
        log.warning("the process that receives weights ended with code %s: %s", self._process.returncode, text)
        if found := _TOO_LONG.search(text):
            return f"the trainer sent {found[1]} bytes, more than the {found[2]} that it announced"
        return f"the process that receives it ended with code {self._process.returncode}; see the log of the target"
