"""What prompts cost in modes with drafters and without."""

from __future__ import annotations

from services.target.speculation.modes.mode import DRAFT_MODES, SpeculationMode

_PROMPT_DECAY = 0.98  # of the cost of prompts, per step that computes some in the same mode
_PROMPT_PRIOR = 512  # prompt tokens for which the average over all modes counts


class PrefillCost:
    """Seconds of a prompt token, where drafters read prompts, too, and where not; and prompt tokens per new token.

    Prompts of one trial may be twice as expensive as those of another, so modes with drafts are one class here.
    """

    def __init__(self) -> None:
        self._tokens = {True: 0.0, False: 0.0}  # by whether drafters read them
        self._seconds = {True: 0.0, False: 0.0}
        self._reading = 0.0  # seconds for which steps were held while drafters read prompts
        self._all_tokens = 0.0
        self._committed = 0.0  # for as long as prompt tokens are remembered

    def observe(self, mode: SpeculationMode, tokens: int, seconds: float) -> None:
        """Add a step. seconds: of its prompt tokens."""
        drafted = mode in DRAFT_MODES
        self._tokens[drafted] = self._tokens[drafted] * _PROMPT_DECAY + tokens
        self._seconds[drafted] = self._seconds[drafted] * _PROMPT_DECAY + seconds
        self._reading *= _PROMPT_DECAY if drafted else 1.0
        self._all_tokens = self._all_tokens * _PROMPT_DECAY + tokens
        self._committed *= _PROMPT_DECAY

    def held(self, seconds: float) -> None:
        """A step was held for drafters that read prompts, which belongs to the cost of these."""
        self._reading += seconds

    @property
    def seconds_per_prompt_token(self) -> float:
        """Seconds in which the target computes a prompt token, in all modes; 0 before one was computed."""
        tokens = sum(self._tokens.values())
        return sum(self._seconds.values()) / tokens if tokens else 0.0

    @property
    def prompt_tokens_per_token(self) -> float:
        """Prompt tokens for each new token."""
        return self._all_tokens / self._committed if self._committed else 0.0

    def committed(self, tokens: int) -> None:
        """Add committed tokens of all sessions."""
        self._committed += tokens

    def seconds(self, mode: SpeculationMode) -> float:
        """A new token's share of prompts in a mode, in seconds."""
        tokens = sum(self._tokens.values())
        if not tokens or not self._committed:
            return 0.0
        average = sum(self._seconds.values()) / tokens
        drafted = mode in DRAFT_MODES
        own = self._seconds[drafted] + (self._reading if drafted else 0.0)
        each = (own + _PROMPT_PRIOR * average) / (self._tokens[drafted] + _PROMPT_PRIOR)
        return each * self._all_tokens / self._committed
