"""`python -m services.target.process.weights.receiver_process DESCRIPTOR`: a member of a trainer's group over gloo.

gloo ends its process for a message that is larger than its room, and a member that passes messages on cannot have more
room than it passes on. So this process is the member, and the target outlives it.

The descriptor is a socket to the target, which carries a JSON object for each request and answer: first a membership
and a `timeout`, then `bytes` beside a file of that size, which is filled with what the trainer broadcasts. An answer
has the `error`, or is empty. The process ends when the target closes the socket.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import select
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.target.process.weights.member import Member, Membership, reason

MESSAGE_BYTES = 1 << 14


def mapped(file: int, size: int) -> Tensor:
    """The content of a file, [size] uint8, in memory that is shared with all that map it."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


class _Receiver:
    """Does what the target asks for."""

    def __init__(self) -> None:
        self._member: Member | None = None

    def answer(self, request: Mapping[str, Any], files: list[int]) -> dict[str, str]:
        """Join, or receive into a file."""
        try:
            if self._member is None:
                self._member = Member(Membership(**request["membership"]), request["timeout"])
            else:
                self._member.receive(mapped(files[0], request["bytes"]))
        except Exception as error:  # of the network, or of a name that is taken
            return {"error": reason(error)[:1000]}
        finally:
            for file in files:
                os.close(file)
        return {}


def main(descriptor: int) -> None:
    """Serve the target until it closes the socket."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    link, receiver = socket.socket(fileno=descriptor), _Receiver()
    threading.Thread(target=_end_with_target, args=(descriptor,), daemon=True).start()
    while True:
        content, files, _, _ = socket.recv_fds(link, MESSAGE_BYTES, 1)
        if not content:
            return
        link.send(json.dumps(receiver.answer(json.loads(content), files)).encode())


def _end_with_target(link: int) -> None:
    """Also while a broadcast is awaited."""
    closed = select.poll()
    closed.register(link, 0)  # of which the end is reported in any case
    closed.poll()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # no threads of gloo are awaited
