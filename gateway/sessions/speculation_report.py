"""What an answer reports of its speculation and times, in the shapes of vLLM, SGLang and llama.cpp.

A step counts as a draft if it verified at least one draft token. Accept length is tokens per draft with bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.sessions.step_stats import StepStats, by_label, source_counts

Detail = Literal["off", "summary", "detailed"]


@dataclass(frozen=True)
class SpeculationReport:
    """One answer. Times in seconds: from request to first token, and from first to last token."""

    steps: Sequence[StepStats]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_seconds: float
    decode_seconds: float

    @property
    def drafts(self) -> list[StepStats]:
        """Steps that verified draft tokens."""
        return [step for step in self.steps if step.verified]

    @property
    def verified(self) -> int:
        """Draft tokens that were verified."""
        return sum(step.verified for step in self.steps)

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(step.accepted for step in self.steps)

    def speculative_decoding(self, detail: Detail) -> dict[str, Any]:
        """As in vLLM's `metrics`. detail: "detailed" adds one entry per draft."""
        drafts, accepted, verified = self.drafts, self.accepted, self.verified
        widest = max((step.verified for step in drafts), default=0)
        report: dict[str, Any] = {
            "mean_acceptance_length": 1 + accepted / len(drafts) if drafts else None,
            "draft_acceptance_rate": accepted / verified if verified else None,
            "acceptance_histogram": histogram(drafts, widest),
            "num_spec_steps": len(drafts),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": verified,
            "num_spec_tokens": widest,
            "sources": self._sources("num_draft_tokens", "num_accepted_draft_tokens"),
        }
        if detail == "detailed":
            report["per_step_accepted"] = [step.accepted for step in drafts]
            report["per_step_drafted"] = [step.verified for step in drafts]
        return report

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
        timings: dict[str, Any] = {
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
        if self.drafts:
            timings["draft_n"] = self.verified
            timings["draft_n_accepted"] = self.accepted
        return timings

    def meta_info(self) -> dict[str, Any]:
        """As in SGLang's `meta_info`, under its present and its former names.

        SGLang's clients divide tokens by `spec_verify_ct`, so plain steps count there as well.
        """
        drafts, accepted, verified = self.drafts, self.accepted, self.verified
        length = self.completion_tokens / len(self.steps) if self.steps else 0.0
        rate = accepted / verified if verified else 0.0
        counts = histogram(drafts, max((step.accepted for step in drafts), default=0))
        return {
            "spec_verify_ct": len(self.steps),
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
            "spec_sources": self._sources("proposed", "accepted"),
        }

    def _sources(self, *names: str) -> dict[str, dict[str, int]]:
        """By draft source, verified and accepted draft tokens, under these names."""
        counts = by_label(source_counts(self.drafts))
        return {label: dict(zip(names, count, strict=True)) for label, count in counts.items()}


def histogram(drafts: Sequence[StepStats], largest: int) -> list[int]:
    """Number of drafts that accepted 0, 1, .. `largest` tokens; empty without drafts."""
    counts = [0] * (largest + 1 if drafts else 0)
    for step in drafts:
        counts[step.accepted] += 1
    return counts
