"""What came of one request, and how it is read from the chunks that servers of many makes send."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SILENT = "empty answer"


@dataclass
class Outcome:
    """One request. Times are seconds on the clock of the load, which starts at 0.

    due: when it should have been sent; latencies count from here, so that a client or a limit that holds requests back
        cannot hide what they waited
    pieces: when each piece of text came; a piece has one token or several
    output_tokens: as the server counted them, unless it did not; then the pieces, and `counted` is False
    drafted, accepted: draft tokens that were verified and accepted, if the server told; None if not
    histogram: how many steps accepted 0, 1, 2, ... draft tokens, of those that had any; empty if it is not told
    error: what kind of failure it was; empty if none. detail: one example in words
    """

    category: str
    turn: int = 0
    due: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    drafted: int | None = None
    accepted: int | None = None
    histogram: list[int] = field(default_factory=list)
    streamed: bool = False
    finish: str = ""
    error: str = ""
    detail: str = ""

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.texts)

    @property
    def ttft(self) -> float | None:
        """Time to the first piece of text, in seconds; None where the answer came whole."""
        return self.pieces[0] - self.due if self.streamed else None

    @property
    def latency(self) -> float:
        """Time to the last piece of text, in seconds."""
        return self.pieces[-1] - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None for a single one."""
        return (self.pieces[-1] - self.pieces[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Times between pieces, in seconds."""
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def silent(self) -> bool:
        """True if the answer is complete, but has no text in it."""
        return self.error == SILENT and self.counted

    def fail(self, kind: str, detail: str = "") -> None:
        """Note a failure; the first one counts."""
        if not self.error:
            self.error, self.detail = kind, detail.strip()[:200]


def take(outcome: Outcome, event: dict[str, Any], now: float) -> None:
    """Note what a chunk of a stream, or a whole answer, says."""
    if event.get("error"):
        error = event["error"]
        outcome.fail("error in the stream", str(error.get("message", error) if isinstance(error, dict) else error))
    for choice in event.get("choices") or []:
        if piece := _piece(choice):
            outcome.pieces.append(now)
            outcome.texts.append(piece)
        outcome.finish = choice.get("finish_reason") or outcome.finish
    if usage := event.get("usage"):
        outcome.prompt_tokens = usage.get("prompt_tokens") or 0
        outcome.output_tokens = usage.get("completion_tokens") or 0
        outcome.counted = usage.get("completion_tokens") is not None
    _take_speculation(outcome, event)


def _piece(choice: dict[str, Any]) -> str:
    """Text of a choice: of a completion, a chunk of a chat, or a whole chat; what a model thinks is text as well."""
    if choice.get("text"):
        return str(choice["text"])
    said = choice.get("delta") or choice.get("message") or {}
    return "".join(said.get(name) or "" for name in ("reasoning_content", "reasoning", "content"))


def _take_speculation(outcome: Outcome, event: dict[str, Any]) -> None:
    """Draft tokens, where servers tell them: OpenAI's field (ours), llama.cpp's timings, vLLM's and SGLang's blocks."""
    details = (event.get("usage") or {}).get("completion_tokens_details") or {}
    timings = event.get("timings") or {}
    vllm = (event.get("metrics") or {}).get("speculative_decoding") or {}
    sglang = event.get("sglext") or event.get("meta_info") or {}
    if timings and not outcome.counted and timings.get("predicted_n") is not None:
        outcome.output_tokens, outcome.counted = timings["predicted_n"], True
        outcome.prompt_tokens = timings.get("prompt_n") or 0
    histogram = vllm.get("acceptance_histogram") or sglang.get("spec_correct_drafts_histogram")
    outcome.histogram = histogram or sglang.get("spec_accept_histogram") or outcome.histogram
    accepted = details.get("accepted_prediction_tokens")
    rejected = details.get("rejected_prediction_tokens")
    found = [
        (None if accepted is None or rejected is None else accepted + rejected, accepted),
        (timings.get("draft_n"), timings.get("draft_n_accepted")),
        (vllm.get("num_draft_tokens"), vllm.get("num_accepted_draft_tokens")),
        (sglang.get("spec_num_proposed_drafts"), sglang.get("spec_num_correct_drafts")),
        (sglang.get("spec_draft_token_num"), sglang.get("spec_accept_token_num")),
    ]
    for drafted, right in found:
        if drafted is not None and right is not None:
            outcome.drafted, outcome.accepted = drafted, right
            return
