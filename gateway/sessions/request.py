"""What a client asks of a generation: filled once at the edge, read by everything behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.serving.messages import Grammar
from outrider.speculation.sampling import SamplingParams

PROMPT = "prompt"  # what services call it in errors


@dataclass(frozen=True)
class GenerationRequest:
    """What a client wants, after the edge's own checks.

    max_tokens: None is the rest of the context; 0 tells of the prompt alone. clamp: one that does not fit is cut
        instead of refused.
    seed: None draws one; numbers below 0 count from the end of 64 bits.
    include_stop: the text ends with what ended it, a stop string or token. verbatim: special tokens are text, too.
    timeout: seconds after which it ends with DeadlineExceeded.
    grammar, logprobs, prompt_logprobs, priority, max_draft_tokens: as in OpenSession.
    watched: rounds tell what the draft guessed.
    begins: the text is one of its own, as an answer in a chat is, and does not go on where the prompt ends.
    prompt_field: what the client calls the prompt, for errors.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int | None = None
    clamp: bool = False
    min_tokens: int = 0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop: bool = False
    verbatim: bool = False
    timeout: float | None = None
    priority: int = 0
    max_draft_tokens: int | None = None
    watched: bool = False
    begins: bool = False
    prompt_field: str = PROMPT

    def choices(self, count: int) -> list[GenerationRequest]:
        """It, once for each choice; their seeds follow one another."""
        seed = self.seed
        return [replace(self, seed=None if seed is None else seed + choice) for choice in range(count)]
