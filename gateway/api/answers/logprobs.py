"""Log-probabilities as bodies tell them: a chat's, a completion's, and those of a prompt."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from gateway.text.pieces import Pieces
from outrider.speculation.proposal import Logprobs

_LEAST = -9999.0  # instead of minus infinity, which JSON does not know


class Teller(ABC):
    """Tells the log-probabilities of one choice, part after part."""

    def __init__(self, pieces: Pieces, *, by_id: bool = False) -> None:
        """by_id: tokens are called `token_id:` and their number, which tells apart those of the same text."""
        self._pieces = pieces
        self._by_id = by_id

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._by_id else self._pieces.text(token)

    @abstractmethod
    def part(self, tokens: Sequence[int], told: Logprobs) -> dict[str, Any]:
        """`logprobs` of tokens, the first ones that are told of."""

    @abstractmethod
    def nothing(self) -> dict[str, Any]:
        """`logprobs` of no tokens."""

    @abstractmethod
    def prompt(self, tokens: Sequence[int], told: Logprobs | None) -> dict[str, Any]:
        """`logprobs` of a prompt that the answer repeats. told: of all tokens but the first; None if there is one."""


class ChatTeller(Teller):
    """An object for each token."""

    def part(self, tokens: Sequence[int], told: Logprobs) -> dict[str, Any]:
        """As in Teller."""
        content = [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(*pair) for pair in top]}
            for token, logprob, top in rows(tokens, told)
        ]
        return {"content": content, "refusal": None}

    def nothing(self) -> dict[str, Any]:
        """As in Teller."""
        return {"content": [], "refusal": None}

    def prompt(self, tokens: Sequence[int], told: Logprobs | None) -> dict[str, Any]:
        """As in Teller, without the first token."""
        return self.nothing() if told is None else self.part(tokens[1:], told)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": finite(logprob),
            "bytes": list(self._pieces[token]),
        }


class CompletionTeller(Teller):
    """Parallel lists; offsets count characters from the beginning of the choice's text."""

    def __init__(self, pieces: Pieces, *, by_id: bool = False) -> None:
        super().__init__(pieces, by_id=by_id)
        self._offset = 0

    def part(self, tokens: Sequence[int], told: Logprobs) -> dict[str, Any]:
        """As in Teller."""
        return self._lists(rows(tokens, told))

    def nothing(self) -> dict[str, Any]:
        """As in Teller."""
        return self._lists([])

    def prompt(self, tokens: Sequence[int], told: Logprobs | None) -> dict[str, Any]:
        """As in Teller; the first token has no log-probability."""
        head = self._lists([(tokens[0], None, [])])
        return head if told is None else joined([head, self.part(tokens[1:], told)])

    def _lists(self, rows: Sequence[tuple[int, float | None, list[tuple[int, float]]]]) -> dict[str, Any]:
        lists: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, logprob, top in rows:
            name = self._name(token)
            own = None if logprob is None else finite(logprob)
            best: dict[str, float | None] = {self._name(other): finite(value) for other, value in top}
            lists["text_offset"].append(self._offset)
            lists["token_logprobs"].append(own)
            lists["tokens"].append(name)
            lists["top_logprobs"].append(None if own is None else {name: own, **best})
            self._offset += len(self._pieces.text(token))
        return lists


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several parts of a choice as one."""
    lists = [key for key, value in parts[0].items() if isinstance(value, list)]
    return parts[0] | {key: [entry for part in parts for entry in part[key]] for key in lists}


def prompt_entries(pieces: Pieces, tokens: Sequence[int], told: Logprobs | None) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`, as vLLM has it: for each token but the first, by id, those likely in its place and itself."""
    entries: list[dict[str, Any] | None] = [None]
    for token, logprob, top in [] if told is None else rows(tokens[1:], told):
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


def rows(tokens: Sequence[int], told: Logprobs) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Of each token: itself, its log-probability, and the likeliest tokens with theirs."""
    tops = zip(told.top_tokens.tolist(), told.top_values.tolist(), strict=True)
    rows = zip(tokens, told.values.tolist(), tops, strict=False)
    return [(token, value, list(zip(*top, strict=True))) for token, value, top in rows]


def finite(logprob: float) -> float:
    """A number that JSON knows."""
    return logprob if math.isfinite(logprob) else _LEAST
