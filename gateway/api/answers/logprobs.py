"""Log-prob formatters: the shapes of chats, completions and prompts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from gateway.text.offsets import TextOffsets
from gateway.text.pieces import Pieces
from outrider.speculation.proposal import Logprobs

_MIN_LOGPROB = -9999.0  # for minus infinity, which JSON has not


class LogprobFormatter(ABC):
    """Formats the log-probabilities of one choice, part by part."""

    def __init__(self, pieces: Pieces, *, by_id: bool = False) -> None:
        """by_id: tokens are named `token_id:` and their id, because several tokens may have the same text."""
        self._pieces = pieces
        self._by_id = by_id

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._by_id else self._pieces.text(token)

    @abstractmethod
    def part(self, tokens: Sequence[int], logprobs: Logprobs) -> dict[str, Any]:
        """`logprobs` of tokens, which are the first ones of `logprobs`."""

    def sent(self, part: dict[str, Any] | None, text: str, *, last: bool) -> dict[str, Any] | None:
        """What to send of the parts so far, beside a piece of the choice's text. last: it is the last one."""
        del text, last
        return part

    @abstractmethod
    def empty(self) -> dict[str, Any]:
        """`logprobs` of no tokens."""

    @abstractmethod
    def first(self, token: int) -> dict[str, Any]:
        """`logprobs` of the first token of a prompt that the answer echoes; it has no log-probability."""


class ChatLogprobs(LogprobFormatter):
    """An object for each token."""

    def part(self, tokens: Sequence[int], logprobs: Logprobs) -> dict[str, Any]:
        """As in LogprobFormatter."""
        content = [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(*pair) for pair in top]}
            for token, logprob, top in token_logprobs(tokens, logprobs)
        ]
        return {"content": content, "refusal": None}

    def empty(self) -> dict[str, Any]:
        """As in LogprobFormatter."""
        return {"content": [], "refusal": None}

    def first(self, token: int) -> dict[str, Any]:
        """As in LogprobFormatter; the token is left out."""
        del token
        return self.empty()

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": finite(logprob),
            "bytes": list(self._pieces[token]),
        }


class CompletionLogprobs(LogprobFormatter):
    """Parallel lists; offsets count characters from the beginning of the choice's text.

    Entries are sent with the text in which they begin: tokens of a possible stop string wait, and if it was one, all of
    them begin at the end of the text.
    """

    def __init__(self, pieces: Pieces, offsets: TextOffsets, *, by_id: bool = False) -> None:
        """offsets: of the choice's tokens."""
        super().__init__(pieces, by_id=by_id)
        self._offsets = offsets
        self._length = 0  # of the text so far
        self._waiting: dict[str, Any] | None = None

    def sent(self, part: dict[str, Any] | None, text: str, *, last: bool) -> dict[str, Any] | None:
        """As in LogprobFormatter."""
        self._length += len(text)
        known = [one for one in (self._waiting, part) if one is not None]
        if not known:
            return None
        whole, self._waiting = joined(known), None
        offsets = whole["text_offset"]
        if offsets and offsets[-1] > self._length:
            ready = bisect_right(offsets, self._length)
            if last:
                offsets[ready:] = [self._length] * (len(offsets) - ready)
            else:
                self._waiting = {key: entries[ready:] for key, entries in whole.items()}
                whole = {key: entries[:ready] for key, entries in whole.items()}
        return whole if whole["tokens"] else None

    def part(self, tokens: Sequence[int], logprobs: Logprobs) -> dict[str, Any]:
        """As in LogprobFormatter."""
        return self._lists(token_logprobs(tokens, logprobs))

    def empty(self) -> dict[str, Any]:
        """As in LogprobFormatter."""
        return self._lists([])

    def first(self, token: int) -> dict[str, Any]:
        """As in LogprobFormatter."""
        return self._lists([(token, None, [])])

    def _lists(self, entries: Sequence[tuple[int, float | None, list[tuple[int, float]]]]) -> dict[str, Any]:
        lists: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, logprob, top in entries:
            name = self._name(token)
            own = None if logprob is None else finite(logprob)
            best: dict[str, float | None] = {self._name(other): finite(value) for other, value in top}
            lists["text_offset"].append(self._offsets.next(token))
            lists["token_logprobs"].append(own)
            lists["tokens"].append(name)
            lists["top_logprobs"].append(None if own is None else {name: own, **best})
        return lists


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The concatenation of several parts of a choice."""
    lists = [key for key, value in parts[0].items() if isinstance(value, list)]
    return parts[0] | {key: [entry for part in parts for entry in part[key]] for key in lists}


def prompt_entries(pieces: Pieces, tokens: Sequence[int], logprobs: Logprobs) -> list[dict[str, Any]]:
    """vLLM's `prompt_logprobs`: for each of these tokens, itself and the likeliest tokens there, by id."""
    entries: list[dict[str, Any]] = []
    for token, logprob, top in token_logprobs(tokens, logprobs):
        named: dict[int, tuple[float, int | None]] = {
            other: (value, rank) for rank, (other, value) in enumerate(top, start=1)
        }
        named.setdefault(token, (logprob, None))
        entries.append(
            {
                str(other): {"logprob": finite(value), "rank": rank, "decoded_token": pieces.text(other)}
                for other, (value, rank) in named.items()
            }
        )
    return entries


def token_logprobs(tokens: Sequence[int], logprobs: Logprobs) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """For each token: its id, its log-probability, and the likeliest tokens at its position with theirs."""
    tops = zip(logprobs.top_tokens.tolist(), logprobs.top_values.tolist(), strict=True)
    entries = zip(tokens, logprobs.values.tolist(), tops, strict=False)
    return [(token, value, list(zip(*top, strict=True))) for token, value, top in entries]


def finite(logprob: float) -> float:
    """A finite number, which JSON can represent."""
    return logprob if math.isfinite(logprob) else _MIN_LOGPROB
