"""The growing text of one answer: detokenized, and cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.text.detokenizer import Detokenizer
from gateway.text.stop import StopMatcher
from outrider.speculation.proposal import FinishReason


class AnswerText:
    """Text of one generation.

    With stop strings it processes token by token, so that text and count do not depend on the sizes of commits.

    count: tokens of the answer so far. stopped, matched: whether a stop string ended it, and which
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int, *, include_stop: bool = False
    ) -> None:
        """min_tokens: new tokens before which no stop string is matched."""
        self.include_stop = include_stop
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self.count = 0
        self.stopped = False
        self.matched = ""

    def add(self, tokens: list[int], finish: FinishReason) -> tuple[str, int]:
        """The text that can be sent, and how many of the tokens belong to the answer."""
        last = finish is not FinishReason.RUNNING
        # A stop token counts, but its text is not part of the answer.
        text_tokens = tokens[:-1] if finish is FinishReason.STOP and not self.include_stop else tokens
        if self._matcher is not None:
            return self._add_one_by_one(self._matcher, tokens, len(text_tokens), last)
        self.count += len(tokens)
        piece = self._detokenizer.add(text_tokens)
        return (piece + self._detokenizer.finish() if last else piece), len(tokens)

    def _add_one_by_one(self, matcher: StopMatcher, tokens: list[int], count: int, last: bool) -> tuple[str, int]:
        """count: the number of tokens that are text."""
        out = ""
        for used, token in enumerate(tokens[:count], start=1):
            self.count += 1
            piece = self._detokenizer.add((token,))
            out += matcher.push(piece) if self.count > self._min_tokens else piece
            if matcher.stopped:
                return out + self._stop(matcher), used
        self.count += len(tokens) - count
        if last:
            out += matcher.push(self._detokenizer.finish())
            out += self._stop(matcher) if matcher.stopped else matcher.finish()
        return out, len(tokens)

    def _stop(self, matcher: StopMatcher) -> str:
        """Record the matched stop string. Returns the part of it that belongs to the text."""
        self.stopped, self.matched = True, matcher.matched
        return matcher.matched if self.include_stop else ""
