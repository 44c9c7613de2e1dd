"""How a session survives failures of services: how often it is opened again, and which commits it takes then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gateway.streams.target import TargetLink
from outrider.speculation.proposal import path_hash


@dataclass
class Failures:
    """How often services failed a session, which bounds how often it is opened again.

    target: failures that a target reported
    losses: lost targets and lost frames since the last committed token
    draft, draft_at: failures that a draft service reported, and the number of tokens at the last one
    refused_by: targets whose admission queue was full
    """

    target: int = 0
    losses: int = 0
    draft: int = 0
    draft_at: int = 0
    refused_by: set[TargetLink] = field(default_factory=set)


class Reopening:
    """A session that was opened a second time on the target that has it: commits of both runs may arrive.

    The runs may differ where batch composition changes rounding, so a commit is taken only if it continues the text
    that the client has.

    active: the session was opened twice. The target may continue it after its end.
    diverged: the target generates another text, and has been sent this one
    """

    def __init__(self) -> None:
        self.active = False
        self.diverged = False
        self._root = 0  # path hash of the session's tokens; kept up to date while active

    def start(self, tokens: Sequence[int]) -> None:
        """The session is opened again with these tokens."""
        if not self.active:
            self._root = path_hash(np.array(tokens, np.uint32))
        self.active = True

    def accepts(self, text: Sequence[int], base: int, tokens: Sequence[int], root_hash: int) -> bool:
        """True if a commit of `tokens` at position `base` continues the text or repeats a part of it."""
        if not self.active:
            return True
        known = len(text) - base
        new = tokens[known:]
        if list(tokens[:known]) != text[base : base + min(known, len(tokens))]:
            return False
        return not new or path_hash(np.array(new, np.uint32), self._root) == root_hash

    def append(self, tokens: Sequence[int]) -> None:
        """Tokens were committed. Call only while active."""
        self._root = path_hash(np.array(tokens, np.uint32), self._root)
