"""What a step may do about draft tokens."""

from __future__ import annotations

from enum import Enum, auto


class SpeculationMode(Enum):
    """What steps do about draft tokens."""

    WAIT_FOR_DRAFT = auto()  # hold the step until proposals arrive, within a bound
    DRAFT_IF_READY = auto()  # verify the proposals that are there
    # In both, the target's own sources draft where no proposal is predicted to gain more.
    SELF_SPECULATE = auto()  # draft with the target's own sources where they are predicted to pay
    NONE = auto()  # decode plainly


DRAFT_MODES = (SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY)  # those with a draft service
