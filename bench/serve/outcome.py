"""What came of one request, and how it is read from the chunks that servers of many makes send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

SILENT = "empty answer"
_CUT = ("abort", "error")  # finish reasons of answers that a server gave up: Outrider's, SGLang's and vLLM's


@dataclass
class Outcome:
    """One request. Times are seconds on the clock of the load, which starts at 0.

    due: when it should have been sent; latencies count from here, so that a client or a limit that holds requests back
        cannot hide what they waited
    pieces: when each piece of text, or of a call of a tool, came; a piece has one token or several
    owners: of which choice each piece is; empty if there is one
    last: when the last chunk of the answer came; tokens without text, such as the end of text, lie behind all pieces
    lasts: the same of each choice
    texts, contents: of each piece, with and without what the model thinks; both empty where it only calls a tool
    output_tokens: as the server counted them, unless it did not; then the pieces, and `counted` is False
    drafted, accepted: draft tokens that were verified and accepted, if the server told; None if not
    histogram: how many steps accepted 0, 1, 2, ... draft tokens, of those that had any; empty if it is not told
    streamed: whether the answer came in a stream, so that its chunks tell of time
    error: what kind of failure it was; empty if none. detail: one example in words
    """

    category: str
    turn: int = 0
    due: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    last: float = 0.0
    lasts: dict[int, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
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
        """The whole answer, with what the model thought; of several, the first one."""
        return "".join(self._of_first(self.texts))

    @property
    def content(self) -> str:
        """The answer without thoughts: what later turns of a conversation have of it; of several, the first one."""
        return "".join(self._of_first(self.contents))

    @property
    def end(self) -> float:
        """When the answer was complete, in seconds on the clock of the load."""
        return max([self.last, *self.pieces[-1:]])

    @property
    def ttft(self) -> float | None:
        """Time to the first piece, in seconds; None where the answer came whole."""
        return self.pieces[0] - self.due if self.streamed else None

    @property
    def latency(self) -> float:
        """Time to the end of the answer, in seconds."""
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None for a single one, and where all came at once.

        Of several choices each takes its own time for its own tokens, and all have a first one.
        """
        times = self._times()
        seconds = sum(max(self.lasts.get(choice, self.last), own[-1]) - own[0] for choice, own in times.items())
        tokens = self.output_tokens - len(times)
        return seconds / tokens if self.streamed and seconds and tokens > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Times between pieces of the same choice, in seconds."""
        return [later - earlier for own in self._times().values() for earlier, later in pairwise(own)]

    @property
    def silent(self) -> bool:
        """True if the answer is complete, but has no text in it."""
        return self.error == SILENT and self.counted

    def _times(self) -> dict[int, list[float]]:
        """When the pieces of each choice came."""
        times: dict[int, list[float]] = {}
        for owner, piece in zip_longest(self.owners, self.pieces, fillvalue=0):
            times.setdefault(int(owner), []).append(piece)
        return times

    def _of_first(self, parts: Sequence[str]) -> list[str]:
        if not self.owners:
            return list(parts)
        first = min(self.owners)
        return [part for owner, part in zip(self.owners, parts, strict=True) if owner == first]

    def fail(self, kind: str, detail: str = "") -> None:
        """Note a failure; the first one counts."""
        if not self.error:
            self.error, self.detail = kind, detail.strip()[:200]


def take(outcome: Outcome, event: dict[str, Any], now: float) -> None:
    """Note what a chunk of a stream, or a whole answer, says; one of an unforeseen form is a failure of the request."""
    try:
        _take(outcome, event, now)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        outcome.fail("chunk of an unknown form", f"{type(error).__name__}: {error}, in {event}")


def _take(outcome: Outcome, event: dict[str, Any], now: float) -> None:
    if event.get("error"):
        error = event["error"]
        outcome.fail("error in the stream", str(error.get("message", error) if isinstance(error, dict) else error))
    for choice in event.get("choices") or []:
        owner = int(choice.get("index") or 0)
        said = choice.get("delta") or choice.get("message") or {}
        thought, content = _thought(said), _joined(choice.get("text") or said.get("content"), "text")
        if thought or content or said.get("tool_calls") or said.get("function_call"):
            outcome.pieces.append(now)
            outcome.texts.append(thought + content)
            outcome.contents.append(content)
            outcome.owners.append(owner)
        outcome.last = outcome.lasts[owner] = now
        steps = ((choice.get("metrics") or {}).get("speculative_decoding") or {}).get("acceptance_histogram") or ()
        outcome.histogram = [sum(counts) for counts in zip_longest(outcome.histogram, map(int, steps), fillvalue=0)]
        outcome.finish = str(choice.get("finish_reason") or outcome.finish)
        if outcome.finish in _CUT:
            outcome.fail("cut off", f"finish reason {outcome.finish}")
    if usage := event.get("usage"):
        outcome.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        outcome.output_tokens = int(usage.get("completion_tokens") or 0)
        outcome.counted = usage.get("completion_tokens") is not None
    _take_speculation(outcome, event)


def _thought(said: dict[str, Any]) -> str:
    """What a model thinks, in one of two fields, which some servers send both, or in parts of the content."""
    content = said.get("content")
    parts = _joined(content, "thinking") if isinstance(content, list) else ""
    return _joined(said.get("reasoning_content") or said.get("reasoning"), "text") + parts


def _joined(value: Any, name: str) -> str:
    """A text, or what a list of parts has by a name, texts or lists of texts again; nothing of None."""
    return value if isinstance(value, str) else "".join(_joined(part.get(name), "text") for part in value or ())


def _take_speculation(outcome: Outcome, event: dict[str, Any]) -> None:
    """Draft tokens, where servers tell them: OpenAI's field (ours), llama.cpp's timings, vLLM's and SGLang's blocks."""
    details = (event.get("usage") or {}).get("completion_tokens_details") or {}
    timings = event.get("timings") or {}
    vllm = (event.get("metrics") or {}).get("speculative_decoding") or {}
    sglang = event.get("sglext") or event.get("meta_info") or {}
    if timings and not outcome.counted and timings.get("predicted_n") is not None:
        outcome.output_tokens, outcome.counted = int(timings["predicted_n"]), True
        outcome.prompt_tokens = int(timings.get("prompt_n") or 0)
    histogram = vllm.get("acceptance_histogram") or sglang.get("spec_correct_drafts_histogram")
    histogram = histogram or sglang.get("spec_accept_histogram") or outcome.histogram
    outcome.histogram = [int(count) for count in histogram]
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
            outcome.drafted, outcome.accepted = int(drafted), int(right)
            return
