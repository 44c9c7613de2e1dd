"""What every peer is asked for, whatever it is."""

from __future__ import annotations

import contextlib
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PATIENCE = 600.0  # seconds until a peer serves


@dataclass(frozen=True)
class Reply:
    """An answer. tokens: new ones, counted by the peer; first, seconds: until the first token and the last"""

    text: str
    tokens: int
    first: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second behind the first one."""
        return (self.tokens - 1) / max(self.seconds - self.first, 1e-9)


@dataclass(frozen=True)
class Facts:
    """Of a peer. family: peers of one family and one number format should say the same; weights: number format;
    speculation: how it drafts, "" for not at all; size: bytes of weights that a step reads
    """

    name: str
    family: str
    weights: str
    speculation: str = ""
    size: int = 0


class Peer(ABC):
    """Use: `with peer.running():` then `ask`."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    @abstractmethod
    def running(self) -> contextlib.AbstractContextManager[None]:
        """The peer, started and ready."""

    @abstractmethod
    def ask(self, texts: Sequence[str], new: int) -> tuple[float, list[Reply]]:
        """Greedy answers of at most `new` tokens to what a user says, all at once. Returns seconds for all of them."""


@contextlib.contextmanager
def process(command: Sequence[str], log: Path, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process, ended with the context. log: takes what it says."""
    with log.open("wb") as said:
        child = subprocess.Popen(command, stderr=said, **{"stdout": said, **options})  # type: ignore[call-overload]
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(30)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def wait_until(child: subprocess.Popen[bytes], serves: object, log: Path) -> None:
    """Wait for a peer. Raises RuntimeError with the end of what it said, if it does not come up."""
    end = time.monotonic() + _PATIENCE
    while not serves():  # type: ignore[operator]
        if child.poll() is not None or time.monotonic() > end:
            tail = log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{child.args!r} does not serve, exit code {child.poll()}:\n{tail}")
        time.sleep(0.25)
