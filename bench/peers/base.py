"""What every peer is asked for, whatever it is."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reply:
    """An answer. tokens: new ones, counted by the peer; first, seconds: until the first token, and until it is whole"""

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
    speculation: how it drafts, "" for not at all; size: bytes of weights that a step reads; batched: whether steps
    are shared by requests that come at once, which are answered one after another otherwise
    """

    name: str
    family: str
    weights: str
    speculation: str = ""
    size: int = 0
    batched: bool = True


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


def log_of(folder: Path, facts: Facts) -> Path:
    """The file that takes what a peer says."""
    return folder / (facts.name.replace("/", "-").replace(" ", "-") + ".log")


def end_of(log: Path) -> str:
    """What a peer said last."""
    return log.read_text(errors="replace")[-2000:]
