"""Replies of /v1/completions and /v1/chat/completions: whole bodies, and chunks of a stream, one per commit.

All chunks of a stream share everything but their choice, which is serialized once.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.api.answers import prompts
from gateway.api.answers.choice_format import ChatFormat, ChoiceFormat, CompletionFormat
from gateway.api.answers.logprobs import ChatLogprobs, CompletionLogprobs, LogprobFormatter, joined
from gateway.api.answers.streaming import DONE
from gateway.orchestration.generation import Generation, Part, merged
from gateway.sessions.request import GenerationRequest
from gateway.sessions.speculation_report import Detail
from gateway.sessions.step_stats import StepStats
from gateway.text.offsets import TextOffsets
from gateway.text.pieces import Pieces
from gateway.text.tokenizer import ModelTokenizer
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.proposal import FinishReason

_LABELS: dict[int, str] = {kind: kind.label for kind in SourceKind}
_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


class Kind(ABC):
    """Names and shapes in which chats and completions differ.

    prefix: of ids. whole, chunk: names of the two objects. empty: a chunk's fields without text
    one_prompt: all choices have the same prompt, whose token ids stand beside them and not in them
    """

    one_prompt: bool

    def __init__(self, prefix: str, whole: str, chunk: str, empty: dict[str, Any]) -> None:
        self.prefix, self.whole, self.chunk, self.empty = prefix, whole, chunk, empty

    @abstractmethod
    def format(self) -> ChoiceFormat:
        """The default format of a choice."""

    @abstractmethod
    def opening(self) -> dict[str, Any] | None:
        """The fields of a choice's first chunk, if that has no text."""

    @abstractmethod
    def logprobs(self, pieces: Pieces, offsets: TextOffsets, *, by_id: bool) -> LogprobFormatter:
        """A log-prob formatter for one choice. offsets: of its tokens. by_id: as in LogprobFormatter."""


class _Chat(Kind):
    one_prompt = True

    def format(self) -> ChoiceFormat:
        return ChatFormat()

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def logprobs(self, pieces: Pieces, offsets: TextOffsets, *, by_id: bool) -> LogprobFormatter:
        del offsets
        return ChatLogprobs(pieces, by_id=by_id)


class _Completion(Kind):
    one_prompt = False

    def format(self) -> ChoiceFormat:
        return CompletionFormat()

    def opening(self) -> None:
        return None

    def logprobs(self, pieces: Pieces, offsets: TextOffsets, *, by_id: bool) -> LogprobFormatter:
        return CompletionLogprobs(pieces, offsets, by_id=by_id)


CHAT: Kind = _Chat("chatcmpl-", "chat.completion", "chat.completion.chunk", {"delta": {}})
COMPLETION: Kind = _Completion("cmpl-", "text_completion", "text_completion", {"text": ""})


@dataclass(frozen=True)
class ResponseOptions:
    """Optional parts of a reply.

    tokenizer: of the model, for the texts of single tokens
    echo: texts of the prompts, by choice; empty without echo
    ids: token ids of prompt and answer. With ids or echo, log-probabilities include a token that ended the answer.
    by_id: log-probabilities name tokens by id
    prompt_logprobs: log-probabilities of each prompt, in the first of its choices, in its first chunk
    steps: step statistics of each choice. detail: of speculation in `metrics`
    usage: in a last event of its own. continuous_usage: the usage so far in every other event, too
    """

    tokenizer: ModelTokenizer
    ids: bool = False
    by_id: bool = False
    echo: Sequence[str] = ()
    prompt_logprobs: bool = False
    steps: bool = False
    detail: Detail = "summary"
    usage: bool = False
    continuous_usage: bool = False

    @property
    def pieces(self) -> Pieces:
        """Bytes of single tokens."""
        return self.tokenizer.pieces


class CompletionReply:
    """The reply with one or more choices."""

    def __init__(
        self,
        kind: Kind,
        requests: Sequence[GenerationRequest],
        options: ResponseOptions,
        *,
        request_id: str,
        model: str,
        fingerprint: str,
        candidates: int = 1,
        choices: int | None = None,
        new_format: Callable[[], ChoiceFormat] | None = None,
    ) -> None:
        """requests: of all candidates, prompt by prompt. model: served name. candidates: generations per prompt.

        choices: how many candidates of a prompt are returned, the likeliest first; by default and in a stream all
        new_format: makes a choice's format; by default that of the kind
        """
        self._kind = kind
        self._head = {
            "id": kind.prefix + request_id, "created": int(time.time()), "model": model,
            "system_fingerprint": fingerprint,
        }  # fmt: skip
        self._requests = requests
        self._options = options
        self._candidates = candidates
        self._choices = choices or candidates
        self._last: dict[int, Part] = {}  # part of each candidate
        self._logprobs: dict[int, LogprobFormatter] = {}
        self._formatted: set[int] = set()  # prompts whose log-probabilities were formatted
        self._prompts: dict[int, orjson.Fragment] = {}  # log-probabilities by prompt, until they are sent
        self._echoes: dict[int, dict[str, Any]] = {}  # ... of the prompt by candidate, until they are sent
        self._formats = [(new_format or kind.format)() for _ in requests]

    async def whole(self, generations: Sequence[Generation]) -> bytes:
        """As in Reply."""
        options, count = self._options, len(self._requests)
        tokens: list[list[int]] = [[] for _ in range(count)]
        empty = self._new_logprobs(0).empty()
        logprobs = [[empty] if request.logprobs is not None else [] for request in self._requests]
        extras: list[dict[str, Any]] = [{} for _ in range(count)]
        steps: list[list[StepStats]] = [[] for _ in range(count)]
        sums = [0.0] * count  # of the log-probabilities of all tokens
        async for index, part in merged(generations):
            if part.logprobs is not None:
                sums[index] += float(part.logprobs.values.sum())
            if index not in self._last:
                await self._prepare(index, part)
            text, part_logprobs, extra = self._content(index, part)
            self._formats[index].add(text, part.tokens, part.finish)
            tokens[index] += part.tokens
            logprobs[index] += [prompts.serialized(part_logprobs)] if part_logprobs else []
            extras[index] |= extra
            steps[index] += part.step_stats
            self._last[index] = part
        choices = [
            {
                "index": index,
                **choice.whole(),
                "logprobs": joined(logprobs[index]) if logprobs[index] else None,
                **self._ending(index, self._last[index]),
                **extras[index],
                **({"token_ids": tokens[index]} if options.ids else {}),
                **({"speculation": _steps(tokens[index], steps[index], options.pieces)} if options.steps else {}),
            }
            for index, choice in enumerate(self._formats)
        ]
        choices = self._best(choices, [total / max(1, len(own)) for total, own in zip(sums, tokens, strict=True)])
        for prompt, entries in self._prompts.items():
            choices[prompt * self._choices]["prompt_logprobs"] = entries
        ending = {"usage": self._usage(), **self._prompt_ids(), **self._metadata(), **self._reports()}
        return orjson.dumps({**self._head, "object": self._kind.whole, "choices": choices, **ending})

    def _best(self, choices: list[dict[str, Any]], means: Sequence[float]) -> list[dict[str, Any]]:
        """The choices to return, by prompt, the likeliest first. means: log-probability per token of each candidate."""
        if self._choices == self._candidates:
            return choices
        prompts = range(0, len(choices), self._candidates)
        groups = (sorted(choices[i : i + self._candidates], key=lambda one: -means[one["index"]]) for i in prompts)
        best = [choice for group in groups for choice in group[: self._choices]]
        return [choice | {"index": index} for index, choice in enumerate(best)]

    async def events(self, generations: Sequence[Generation]) -> AsyncIterator[bytes]:
        """As in Reply, up to [DONE]."""
        options = self._options
        head = {**self._head, "object": self._kind.chunk}
        before = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        after = b'],"usage":null}\n\n' if options.usage else b"]}\n\n"
        running = len(generations)
        async for index, part in merged(generations):
            first = index not in self._last
            if first:
                await self._prepare(index, part)
            text, logprobs, extra = self._content(index, part)
            if first and index // self._candidates in self._prompts:
                extra["prompt_logprobs"] = self._prompts.pop(index // self._candidates)
            self._last[index] = part
            if options.continuous_usage:
                after = b'],"usage":' + orjson.dumps(self._usage()) + b"}\n\n"
            if first and (opening := self._kind.opening()) is not None:
                behind = b"]," + orjson.dumps(ids)[1:-1] + after[1:] if (ids := self._prompt_ids()) else after
                yield before + orjson.dumps(self._choice(index, opening, None)) + behind
            fields = self._formats[index].add(text, part.tokens, part.finish)
            if fields is not None or options.ids or logprobs or extra or (options.steps and part.step_stats):
                choice = self._choice(index, fields if fields is not None else self._kind.empty, logprobs, part)
                running -= bool(part.finish)
                if not running and not options.usage and (reports := self._reports()):
                    after = b"]," + orjson.dumps(reports)[1:] + b"\n\n"
                yield before + orjson.dumps(choice | extra) + after
        if options.usage:
            last = {**head, "choices": [], "usage": self._usage(), **self._metadata(), **self._reports()}
            yield b"data: " + orjson.dumps(last) + b"\n\n"
        yield DONE

    def _choice(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None, part: Part | None = None
    ) -> dict[str, Any]:
        """A choice of a chunk; of the opening chunk without a part."""
        ending = self._ending(index, part) if part is not None and part.finish else {"finish_reason": None}
        choice = {"index": index, **content, "logprobs": logprobs, **ending}
        if self._options.ids:
            choice["token_ids"] = part.tokens if part is not None else []
        if self._options.steps:
            new, steps = (part.tokens, part.step_stats) if part is not None else ([], ())
            choice["speculation"] = _steps(new, steps, self._options.pieces)
        return choice

    def _ending(self, index: int, part: Part) -> dict[str, Any]:
        """Why a choice ended. As in vLLM, `stop_reason` is the stop string or stop token of the request."""
        matched = part.matched
        requested = isinstance(matched, str) or matched in self._requests[index].stop.token_ids
        reason = self._formats[index].finish_reason(_FINISH_REASONS[part.finish])
        ending = {"finish_reason": reason, "stop_reason": matched if requested else None}
        several = len(self._requests) > 1 and self._options.detail != "off"
        return ending | self._report(part) if several else ending

    async def _prepare(self, index: int, part: Part) -> None:
        """Format the log-probabilities of the prompt, which the first part of a candidate has, in turns with others."""
        options, request = self._options, self._requests[index]
        if options.echo and request.logprobs is not None:
            echoed = prompts.echoed(self._formatter(index), request.prompt, part.prompt_logprobs)
            self._echoes[index] = await echoed
        prompt = index // self._candidates
        if options.prompt_logprobs and prompt not in self._formatted:
            self._formatted.add(prompt)
            self._prompts[prompt] = await prompts.entries(options.pieces, request.prompt, part.prompt_logprobs)

    def _content(self, index: int, part: Part) -> tuple[str, dict[str, Any] | None, dict[str, Any]]:
        """What a part adds to its choice: text, `logprobs`, and further fields."""
        options = self._options
        request = self._requests[index]
        logprobs = part.logprobs if request.logprobs is not None else None
        extra: dict[str, Any] = {}
        if options.ids and not self._kind.one_prompt and index not in self._last:
            extra["prompt_token_ids"] = request.prompt
        if logprobs is None and not options.echo:
            return part.text, None, extra
        text, formatted = part.text, []
        formatter = self._formatter(index)
        if index not in self._last:
            if options.echo:
                text = options.echo[index] + text
            if index in self._echoes:
                formatted.append(self._echoes.pop(index))
        # Clients that score a text echo it with a single new token, and take the last entry for that token's.
        count = len(part.tokens) if options.ids or options.echo else part.text_tokens
        if logprobs is not None and count:
            formatted.append(formatter.part(part.tokens[:count], logprobs))
        new = joined(formatted) if formatted else None
        return text, formatter.sent(new, text, last=bool(part.finish)), extra

    def _formatter(self, index: int) -> LogprobFormatter:
        if index not in self._logprobs:
            self._logprobs[index] = self._new_logprobs(index)
        return self._logprobs[index]

    def _new_logprobs(self, index: int) -> LogprobFormatter:
        options, request = self._options, self._requests[index]
        echo = options.echo[index] if options.echo else None
        offsets = TextOffsets(options.tokenizer, request.prompt, echo, verbatim=request.text.verbatim)
        return self._kind.logprobs(options.pieces, offsets, by_id=options.by_id)

    def _prompt_ids(self) -> dict[str, Any]:
        """The prompt's token ids beside the choices, if they have one prompt."""
        return {"prompt_token_ids": self._requests[0].prompt} if self._options.ids and self._kind.one_prompt else {}

    def _metadata(self) -> dict[str, Any]:
        """The version of the last weights, under SGLang's names."""
        version = next(reversed([part.weight_version for part in self._last.values()]), "")
        return {"metadata": {"weight_version": version}} if version else {}

    def _reports(self) -> dict[str, Any]:
        """The reports of a complete reply; with several choices, each has its own."""
        return self._report(self._last[0]) if len(self._requests) == 1 and self._options.detail != "off" else {}

    def _report(self, part: Part) -> dict[str, Any]:
        report = part.report
        assert report is not None, "the last part has a report"
        return {"metrics": report.metrics(self._options.detail), "timings": report.timings()}

    def _usage(self) -> dict[str, Any]:
        """Tokens of all candidates; a prompt counts once."""
        parts = self._last.values()
        # By prompt, the part of its first candidate that has one.
        first = {index // self._candidates: self._last[index] for index in sorted(self._last, reverse=True)}.values()
        prompt = sum(part.prompt_tokens for part in first)
        completion = sum(part.completion_tokens for part in parts)
        accepted = sum(part.accepted for part in parts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(part.cached_tokens for part in first), "audio_tokens": 0},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(part.verified for part in parts) - accepted,
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self._formats),
            },
        }


def _steps(tokens: Sequence[int], steps: Sequence[StepStats], pieces: Pieces) -> dict[str, list[Any]]:
    """Statistics of each step: tokens, verified and accepted draft tokens, their source, and texts of the tokens.

    draft_texts: the draft tokens that the draft service scored highest; `guesses` is the former name
    """
    ends = list(itertools.accumulate(step.tokens for step in steps))
    drafts = [[pieces.text(token) for token in step.draft] for step in steps]
    return {
        "tokens": [step.tokens for step in steps],
        "verified": [step.verified for step in steps],
        "accepted": [step.accepted for step in steps],
        "sources": [_LABELS.get(step.source) for step in steps],
        "texts": [
            [pieces.text(token) for token in tokens[end - step.tokens : end]]
            for step, end in zip(steps, ends, strict=True)
        ],
        "draft_texts": drafts,
        "guesses": drafts,
    }
