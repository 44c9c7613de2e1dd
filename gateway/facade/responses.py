"""Replies as gRPC messages.

vLLM's and SGLang's messages have the same fields; they differ in what a chunk's completion_tokens counts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.api.answers.prompts import slices
from gateway.orchestration.generation import Generation, Part, merged
from gateway.sessions.request import GenerationRequest
from outrider.speculation.proposal import FinishReason, Logprobs


@dataclass
class _Choice:
    """One choice so far."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    input_logprobs: Any = None  # message with the log-probabilities of the prompt
    begun: bool = False


class MessageReply:
    """The reply to one request. pb: module of the service's messages."""

    def __init__(
        self,
        pb: Any,
        requests: Sequence[GenerationRequest],
        *,
        stream: bool,
        counts_all: bool = False,
        prompt_from: int = 0,
        envelope: dict[str, Any] | None = None,
    ) -> None:
        """stream: send chunks before the end of each choice. counts_all: a chunk counts all tokens so far, not its own.

        prompt_from: first prompt position whose log-probabilities are returned. envelope: fields of every message
        """
        self._pb = pb
        self._choices = [_Choice(request) for request in requests]
        self._stream = stream
        self._counts_all = counts_all
        self._prompt_from = prompt_from
        self._envelope = envelope or {}

    async def messages(self, generations: Sequence[Generation]) -> AsyncIterator[Any]:
        """The messages of generations, one per request. Raises the error that ends them."""
        ends: dict[int, Any] = {}
        async for index, part in merged(generations):
            choice = self._choices[index]
            first, choice.begun = not choice.begun, True
            choice.tokens += part.tokens
            if part.logprobs is not None:
                choice.logprobs.append(part.logprobs)
            if first:
                choice.input_logprobs = await self._input(choice.request, part.prompt_logprobs)
            if self._stream and (part.tokens or first):
                yield self._message(chunk=self._chunk(index, choice, part, first))
            if part.finish is not FinishReason.RUNNING:
                ends[index] = self._message(complete=self._complete(index, choice, part))
                if self._stream:
                    yield ends[index]
        if not self._stream:
            for index in sorted(ends):
                yield ends[index]

    def _message(self, **response: Any) -> Any:
        return self._pb.GenerateResponse(**self._envelope, **response)

    def _chunk(self, index: int, choice: _Choice, part: Part, first: bool) -> Any:
        return self._pb.GenerateStreamChunk(
            token_ids=part.tokens,
            prompt_tokens=part.prompt_tokens,
            completion_tokens=part.completion_tokens if self._counts_all else len(part.tokens),
            cached_tokens=part.cached_tokens,
            output_logprobs=self._output(part.tokens, part.logprobs, choice.request),
            input_logprobs=choice.input_logprobs if first else None,
            index=index,
        )

    def _complete(self, index: int, choice: _Choice, part: Part) -> Any:
        logprobs = Logprobs.joined(choice.logprobs) if choice.logprobs else None
        matched: dict[str, Any] = {}
        if isinstance(part.matched, str):
            matched["matched_stop_str"] = part.matched
        elif part.matched is not None:
            matched["matched_token_id"] = part.matched
        return self._pb.GenerateComplete(
            output_ids=choice.tokens,
            finish_reason=part.finish.name.lower(),
            prompt_tokens=part.prompt_tokens,
            completion_tokens=part.completion_tokens,
            cached_tokens=part.cached_tokens,
            output_logprobs=self._output(choice.tokens, logprobs, choice.request),
            input_logprobs=choice.input_logprobs,
            index=index,
            spec_accepted_tokens=part.accepted,
            spec_draft_tokens=part.verified,
            **matched,
        )

    def _output(self, tokens: Sequence[int], logprobs: Logprobs | None, request: GenerationRequest) -> Any:
        if logprobs is None:
            return None
        return self._pb.OutputLogProbs(
            token_logprobs=logprobs.values.tolist(),
            token_ids=tokens[: len(logprobs)],
            top_logprobs=self._tops(logprobs) if request.logprobs else (),
        )

    async def _input(self, request: GenerationRequest, logprobs: Logprobs | None) -> Any:
        """Log-probabilities of the prompt, whose first token has none."""
        if request.prompt_logprobs is None:
            return None
        pb, prompt = self._pb, request.prompt[self._prompt_from :]
        values, tops = [pb.InputTokenLogProb()], [pb.TopLogProbs()]
        wanted = None if logprobs is None else logprobs.behind(self._prompt_from)  # of all tokens but the first
        async for _, part in slices(prompt, wanted):
            values += [pb.InputTokenLogProb(value=value) for value in part.values.tolist()]
            tops += self._tops(part)
        return pb.InputLogProbs(
            token_logprobs=values,
            token_ids=prompt,
            top_logprobs=tops if request.prompt_logprobs else (),
        )

    def _tops(self, logprobs: Logprobs) -> list[Any]:
        tops = zip(logprobs.top_values.tolist(), logprobs.top_tokens.tolist(), strict=True)
        return [self._pb.TopLogProbs(values=values, token_ids=tokens) for values, tokens in tops]
