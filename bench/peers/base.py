"""The interface of a peer: an inference system that answers greedy requests."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reply:
    """An answer. tokens: new ones, counted by the peer; first, seconds: latency of first token and of whole answer."""

    text: str
    tokens: int
    first: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens/s after the first token."""
        return (self.tokens - 1) / max(self.seconds - self.first, 1e-9)


@dataclass(frozen=True)
class PeerInfo:
    """A description of a peer.

    family: peers of one family with equal weights should give equal texts
    weights: number format
    speculation: method, "" for plain decoding
    size: bytes of weights that a step reads
    batched: True if concurrent requests share steps, False if they run one after another
    """

    name: str
    family: str
    weights: str
    speculation: str = ""
    size: int = 0
    batched: bool = True


class Peer(ABC):
    """An inference system. Call `generate` inside `with peer.running():`."""

    def __init__(self, info: PeerInfo) -> None:
        self.info = info

    @abstractmethod
    def running(self) -> contextlib.AbstractContextManager[None]:
        """Start the peer, and stop it at the end of the context. Raises BenchError if it does not start."""

    @abstractmethod
    def generate(self, texts: Sequence[str], new: int) -> tuple[float, list[Reply]]:
        """Send user messages concurrently, for greedy answers of at most `new` tokens.

        Returns seconds for all, and the answers.
        """


def log_file(folder: Path, info: PeerInfo) -> Path:
    """The log file of a peer."""
    return folder / (info.name.replace("/", "-").replace(" ", "-") + ".log")


def log_tail(log: Path) -> str:
    """The last 2,000 bytes of a log."""
    return log.read_text(errors="replace")[-2000:]
