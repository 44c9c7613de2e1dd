"""The outcome of one request, and the parser of chunks from Outrider, vLLM, SGLang, llama.cpp and others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

EMPTY_ANSWER = "empty answer"
_ABORTED = ("abort", "error")  # finish reasons of answers that Outrider, SGLang or vLLM aborted


@dataclass
class Outcome:
    """One request. Times are in seconds on the clock of the load, which starts at 0.

    due: scheduled time of sending. Latencies start here, so that they include delays by the client and its
        concurrency limit
    pieces: arrival times of pieces of text or of tool calls; a piece has one token or more
    owners: index of the choice of each piece; empty if there is one choice
    last: arrival time of the last chunk; later than all pieces if the last tokens have no text, such as end of text
    lasts: the same for each choice
    texts, contents: text of each piece, with and without reasoning; both empty for a piece of a tool call
    output_tokens: the server's count; without one, the number of pieces, and `counted` is False
    drafted, accepted: verified and accepted draft tokens; None if the server does not report them
    histogram: number of steps that accepted 0, 1, 2, ... draft tokens; empty if the server does not report it
    streamed: True if the answer was streamed, so that its chunks have meaningful times
    error, detail: kind of failure and its message; empty if the request succeeded
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
        """The answer with reasoning; of several choices, the first."""
        return "".join(self._of_first(self.texts))

    @property
    def content(self) -> str:
        """The answer without reasoning, as later turns of a conversation contain it; of several choices, the first."""
        return "".join(self._of_first(self.contents))

    @property
    def end(self) -> float:
        """Time of the complete answer."""
        return max([self.last, *self.pieces[-1:]])

    @property
    def ttft(self) -> float | None:
        """Time to the first piece; None if the answer was not streamed."""
        return self.pieces[0] - self.due if self.streamed else None

    @property
    def latency(self) -> float:
        """Time to the end of the answer."""
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single token, or if all tokens arrived together.

        With several choices: the sum of their times over the sum of their tokens, excluding the first token of each.
        """
        times = self._times()
        seconds = sum(max(self.lasts.get(choice, self.last), own[-1]) - own[0] for choice, own in times.items())
        tokens = self.output_tokens - len(times)
        return seconds / tokens if self.streamed and seconds and tokens > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Times between pieces of the same choice."""
        return [later - earlier for own in self._times().values() for earlier, later in pairwise(own)]

    @property
    def empty(self) -> bool:
        """True if the answer is complete and has no text."""
        return self.error == EMPTY_ANSWER and self.counted

    def _times(self) -> dict[int, list[float]]:
        """Arrival times of the pieces of each choice."""
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
        """Record a failure, unless one is recorded already."""
        if not self.error:
            self.error, self.detail = kind, detail.strip()[:200]


def read_event(outcome: Outcome, event: dict[str, Any], now: float) -> None:
    """Record a chunk of a stream, or a whole answer. A chunk of an unknown form is a failure of the request."""
    try:
        _read_fields(outcome, event, now)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        outcome.fail("chunk of an unknown form", f"{type(error).__name__}: {error}, in {event}")


def _read_fields(outcome: Outcome, event: dict[str, Any], now: float) -> None:
    if event.get("error"):
        error = event["error"]
        outcome.fail("error in the stream", str(error.get("message", error) if isinstance(error, dict) else error))
    for choice in event.get("choices") or []:
        owner = int(choice.get("index") or 0)
        message = choice.get("delta") or choice.get("message") or {}
        reasoning, content = _reasoning_of(message), _text_of(choice.get("text") or message.get("content"), "text")
        if reasoning or content or message.get("tool_calls") or message.get("function_call"):
            outcome.pieces.append(now)
            outcome.texts.append(reasoning + content)
            outcome.contents.append(content)
            outcome.owners.append(owner)
        outcome.last = outcome.lasts[owner] = now
        steps = ((choice.get("metrics") or {}).get("speculative_decoding") or {}).get("acceptance_histogram") or ()
        outcome.histogram = [sum(counts) for counts in zip_longest(outcome.histogram, map(int, steps), fillvalue=0)]
        outcome.finish = str(choice.get("finish_reason") or outcome.finish)
        if outcome.finish in _ABORTED:
            outcome.fail("cut off", f"finish reason {outcome.finish}")
    if usage := event.get("usage"):
        outcome.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        outcome.output_tokens = int(usage.get("completion_tokens") or 0)
        outcome.counted = usage.get("completion_tokens") is not None
    _read_speculation(outcome, event)


def _reasoning_of(message: dict[str, Any]) -> str:
    """The reasoning text: in one of two fields, of which some servers send both, or in parts of the content."""
    content = message.get("content")
    parts = _text_of(content, "thinking") if isinstance(content, list) else ""
    return _text_of(message.get("reasoning_content") or message.get("reasoning"), "text") + parts


def _text_of(value: Any, name: str) -> str:
    """The value if it is a text; otherwise the joined fields `name` of a list of parts, which may nest; "" for None."""
    return value if isinstance(value, str) else "".join(_text_of(part.get(name), "text") for part in value or ())


def _read_speculation(outcome: Outcome, event: dict[str, Any]) -> None:
    """Record draft token counts: OpenAI's usage field (Outrider), llama.cpp's timings, vLLM's and SGLang's blocks."""
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
    for drafted, correct in found:
        if drafted is not None and correct is not None:
            outcome.drafted, outcome.accepted = int(drafted), int(correct)
            return
