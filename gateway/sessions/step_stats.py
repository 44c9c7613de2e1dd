"""What is told of one answer besides its text: how speculation went, and how long it took, in others' shapes.

A step counts as a draft if it verified at least one node. Accept length is tokens a draft, the bonus token included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Detail = Literal["off", "summary", "detailed"]


class Round(NamedTuple):
    """What one step committed in a session: tokens, of which the first `accepted` were drafted, of `verified` nodes.

    guess: the tokens that the draft believed in most, where the session is watched
    """

    tokens: int
    verified: int
    accepted: int
    guess: tuple[int, ...] = ()


@dataclass(frozen=True)
class Report:
    """One answer. Times in seconds: from its request to its first token, and from there to its last."""

    rounds: Sequence[Round]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_seconds: float
    decode_seconds: float

    @property
    def drafts(self) -> list[Round]:
        """Steps that verified hints."""
        return [one for one in self.rounds if one.verified]

    def speculative_decoding(self, detail: Detail) -> dict[str, Any]:
        """As in vLLM's `metrics`. detail: "detailed" adds the drafts one by one."""
        drafts = self.drafts
        accepted, verified = sum(one.accepted for one in drafts), sum(one.verified for one in drafts)
        widest = max((one.verified for one in drafts), default=0)
        told: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / len(drafts) if drafts else None,
            "draft_acceptance_rate": accepted / verified if verified else None,
            "acceptance_histogram": histogram(drafts, widest),
            "num_spec_steps": len(drafts),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": verified,
            "num_spec_tokens": widest,
        }
        if detail == "detailed":
            told["per_step_accepted"] = [one.accepted for one in drafts]
            told["per_step_drafted"] = [one.verified for one in drafts]
        return told

    def metrics(self, detail: Detail) -> dict[str, Any]:
        """As vLLM's top-level `metrics`, times in milliseconds."""
        first, decode = 1e3 * self.first_seconds, 1e3 * self.decode_seconds
        further = self.completion_tokens - 1
        return {
            "time_to_first_token_ms": first,
            "generation_time_ms": decode,
            "mean_itl_ms": decode / further if further > 0 else None,
            "tokens_per_second": 1e3 * further / decode if further > 0 and decode > 0 else None,
            "speculative_decoding": self.speculative_decoding(detail),
        }

    def timings(self) -> dict[str, Any]:
        """As llama.cpp's `timings`."""
        computed = self.prompt_tokens - self.cached_tokens
        first, decode = 1e3 * self.first_seconds, 1e3 * self.decode_seconds
        count = self.completion_tokens
        told: dict[str, Any] = {
            "cache_n": self.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": first,
            "prompt_per_token_ms": first / computed if computed else None,
            "prompt_per_second": 1e3 * computed / first if first > 0 else None,
            "predicted_n": count,
            "predicted_ms": decode,
            "predicted_per_token_ms": decode / count if count else None,
            "predicted_per_second": 1e3 * count / decode if decode > 0 else None,
        }
        if drafts := self.drafts:
            told["draft_n"] = sum(one.verified for one in drafts)
            told["draft_n_accepted"] = sum(one.accepted for one in drafts)
        return told

    def meta_info(self) -> dict[str, Any]:
        """As in SGLang's `meta_info`, under the names that it has now and under those that it had before.

        Its readers divide tokens by `spec_verify_ct`, so plain steps count there, too.
        """
        drafts = self.drafts
        accepted, verified = sum(one.accepted for one in drafts), sum(one.verified for one in drafts)
        length = self.completion_tokens / len(self.rounds) if self.rounds else 0.0
        rate = accepted / verified if verified else 0.0
        counts = histogram(drafts, max((one.accepted for one in drafts), default=0))
        return {
            "spec_verify_ct": len(self.rounds),
            "spec_accept_length": length,
            "spec_accept_rate": rate,
            "spec_num_correct_drafts": accepted,
            "spec_num_proposed_drafts": verified,
            "spec_correct_drafts_histogram": counts,
            "spec_accept_histogram": counts,
            "spec_accept_token_num": accepted,
            "spec_draft_token_num": verified,
            "spec_accepted_drafts": accepted,
            "spec_proposed_drafts": verified,
        }


def histogram(drafts: Sequence[Round], most: int) -> list[int]:
    """How many drafts accepted 0, 1, .. most tokens; none if there is no draft."""
    counts = [0] * (most + 1 if drafts else 0)
    for one in drafts:
        counts[one.accepted] += 1
    return counts
