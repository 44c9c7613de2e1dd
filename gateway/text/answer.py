"""The text of one answer as it grows: detokenized, and cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.text.detokenizer import Detokenizer
from gateway.text.stop import StopMatcher
from outrider.speculation.proposal import FinishReason


class AnswerText:
    """Text of one generation: detokenized, and cut at stop strings.

    With stop strings it goes token by token, so that neither text nor count depend on how tokens came together.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int, *, include_stop: bool = False
    ) -> None:
        """min_tokens: new tokens before which no stop string is looked for."""
        self.include_stop = include_stop
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self.count = 0
        self.stopped = False
        self.matched = ""

    def add(self, tokens: list[int], finish: FinishReason) -> tuple[str, int]:
        """The text that can be given out, and how many of the tokens belong to the answer."""
        last = finish is not FinishReason.RUNNING
        # A token that ended the generation counts, but its text is no part of the answer.
        spoken = tokens[:-1] if finish is FinishReason.STOP and not self.include_stop else tokens
        if self._matcher is not None:
            return self._add_one_by_one(self._matcher, tokens, len(spoken), last)
        self.count += len(tokens)
        piece = self._detokenizer.add(spoken)
        return (piece + self._detokenizer.finish() if last else piece), len(tokens)

    def _add_one_by_one(self, matcher: StopMatcher, tokens: list[int], spoken: int, last: bool) -> tuple[str, int]:
        out = ""
        for used, token in enumerate(tokens[:spoken], start=1):
            self.count += 1
            piece = self._detokenizer.add((token,))
            out += matcher.push(piece) if self.count > self._min_tokens else piece
            if matcher.stopped:
                return out + self._stop(matcher), used
        self.count += len(tokens) - spoken
        if last:
            out += matcher.push(self._detokenizer.finish())
            out += self._stop(matcher) if matcher.stopped else matcher.finish()
        return out, len(tokens)

    def _stop(self, matcher: StopMatcher) -> str:
        """Note the stop string that was found. Returns what is told of it."""
        self.stopped, self.matched = True, matcher.matched
        return matcher.matched if self.include_stop else ""
