"""What a compiled program computes in one call beyond a single step, on runners that can; others compute one step.

    MultiStepDecoding   plain steps, each from the tokens of the one before it
    CopyDrafting        the same with the narrow copy of the weights: draft tokens of the quantized self-draft
    HeadDrafting        the head's rows of committed tokens, then draft tokens of the local EAGLE head
    FusedLoop           drafting and verification of one session, iteration after iteration

A program returns early after a step that ends a session, and once a message arrives (`Interrupts`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Interrupts:
    """When a program returns before its last step.

    stops:       int64, stop token ids, session after session
    stop_counts: [S] int64 ("q"), how many of them belong to each session
    files:       int32 ("i"), descriptors, one of which becomes readable when a message arrives
    """

    stops: bytes
    stop_counts: array[int]
    files: array[int]


@dataclass(frozen=True)
class SessionTexts:
    """The sessions' own tokens, for programs that read or extend them.

    addresses: [S] int64 ("q"), addresses of their tokens, uint32, with room for those that the program commits; 0 for a
               session that multi-step decoding does not look up
    lengths:   [S] int64 ("q"), tokens of each
    match:     the program returns once the last `match` tokens of a text occurred in it before; 0 to go on
    """

    addresses: array[int]
    lengths: array[int]
    match: int


@dataclass(frozen=True)
class DraftTokenValue:
    """Costs and gains of draft tokens, in seconds.

    next:  gain of a draft token of which only its predecessors' acceptance is known
    token: gain of an accepted draft token
    row:   cost of verifying a draft token
    step:  cost of drafting one more token for every session
    """

    next: float
    token: float
    row: float
    step: float


@dataclass(frozen=True)
class _TokenByToken:
    """A program that samples a token of each session in each of its steps."""

    steps: int
    interrupts: Interrupts

    @property
    def extra_slots(self) -> int:
        """Slots of a session in the cache behind those of the first step's tokens."""
        return self.steps - 1


@dataclass(frozen=True)
class MultiStepDecoding(_TokenByToken):
    """Plain steps. texts: None unless the program returns where prompt lookup finds a match."""

    texts: SessionTexts | None = None


@dataclass(frozen=True)
class CopyDrafting(_TokenByToken):
    """Draft tokens of the narrow copy. The target writes anew what the copy writes into the cache."""


@dataclass(frozen=True)
class HeadDrafting(_TokenByToken):
    """Draft tokens of the local EAGLE head, behind its rows of committed tokens.

    value:      drafting ends where another draft token is not worth its cost; None to draft all steps
    acceptance: [2, 16] float32 ("f"), acceptance rates by the head's probabilities, see calibration_bins.py
    """

    value: DraftTokenValue | None = None
    acceptance: array[float] | None = None


@dataclass(frozen=True)
class HeadInLoop:
    """The local EAGLE head in a fused loop.

    known:              rows that the head has written
    value, acceptance:  as of HeadDrafting
    """

    known: int
    value: DraftTokenValue
    acceptance: array[float]


@dataclass(frozen=True)
class FusedLoop:
    """Drafting and verification of one session, without a return to the engine between two iterations.

    steps:   most iterations
    seconds: no iteration begins later
    room:    most tokens that may be committed, at least 2
    depth:   most draft tokens of an iteration
    head:    drafts; None if the narrow copy of the weights does
    """

    steps: int
    interrupts: Interrupts
    texts: SessionTexts
    seconds: float
    room: int
    depth: int
    head: HeadInLoop | None = None

    @property
    def extra_slots(self) -> int:
        """As of MultiStepDecoding."""
        return self.room


StepProgram = MultiStepDecoding | CopyDrafting | HeadDrafting | FusedLoop


class LoopIteration(NamedTuple):
    """The outcome of one iteration of a fused loop.

    written:                       rows of committed tokens that the head computed first
    drafted, verified, accepted:   draft tokens
    committed:                     tokens
    draft_seconds, verify_seconds: time of each half
    probabilities:                 of the verified draft tokens, as the head gives them
    known:                         rows of committed tokens that the head has written
    """

    written: int
    drafted: int
    verified: int
    accepted: int
    committed: int
    draft_seconds: float
    verify_seconds: float
    probabilities: Sequence[float]
    known: int
