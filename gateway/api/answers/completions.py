"""Bodies of answers: whole ones, and the chunks of a stream, one for each commit.

A chunk's frame is the same from the first to the last but for its choice, so it is serialized once.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gateway.api.answers.choice_format import ChatVoice, CompletionVoice, Voice
from gateway.api.answers.logprobs import ChatTeller, CompletionTeller, Teller, joined, prompt_entries
from gateway.api.answers.streaming import DONE
from gateway.orchestration.generation import Generation, Part, merged
from gateway.orchestration.generator import Generator
from gateway.sessions.request import GenerationRequest
from gateway.sessions.step_stats import Detail, Round
from gateway.text.pieces import Pieces
from outrider.speculation.proposal import FinishReason

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


class Kind(ABC):
    """Names and shapes in which chats and completions differ."""

    one_prompt: bool
    """All choices are of one prompt, whose ids are told beside them, not in them."""

    def __init__(self, prefix: str, whole: str, chunk: str, nothing: dict[str, Any]) -> None:
        """nothing: what a chunk without text says."""
        self.prefix, self.whole, self.chunk, self.nothing = prefix, whole, chunk, nothing

    @abstractmethod
    def voice(self) -> Voice:
        """What tells a choice's text, if nothing else is said."""

    @abstractmethod
    def opening(self) -> dict[str, Any] | None:
        """What the first chunk of a choice says, if it is one of its own."""

    @abstractmethod
    def teller(self, pieces: Pieces, *, by_id: bool) -> Teller:
        """Tells of one choice's log-probabilities. by_id: as in Teller."""


class _Chat(Kind):
    one_prompt = True

    def voice(self) -> Voice:
        return ChatVoice()

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def teller(self, pieces: Pieces, *, by_id: bool) -> Teller:
        return ChatTeller(pieces, by_id=by_id)


class _Completion(Kind):
    one_prompt = False

    def voice(self) -> Voice:
        return CompletionVoice()

    def opening(self) -> None:
        return None

    def teller(self, pieces: Pieces, *, by_id: bool) -> Teller:
        return CompletionTeller(pieces, by_id=by_id)


CHAT: Kind = _Chat("chatcmpl-", "chat.completion", "chat.completion.chunk", {"delta": {}})
COMPLETION: Kind = _Completion("cmpl-", "text_completion", "text_completion", {"text": ""})


@dataclass(frozen=True)
class Telling:
    """What an answer tells besides text. echo: the prompts' texts, by choice; empty if they are not part of it.

    ids: of all tokens, those of the prompt, too. With either, log-probabilities are of one that ended the answer, too.
    steps: of each choice, what every step drafted; detail: of speculation in its metrics.
    by_id: log-probabilities call tokens by their ids.
    usage: in an event of its own behind the others; usages: so far, in every other event, too.
    """

    pieces: Pieces
    ids: bool = False
    by_id: bool = False
    echo: Sequence[str] = ()
    prompt_logprobs: bool = False
    steps: bool = False
    detail: Detail = "summary"
    usage: bool = False
    usages: bool = False


class Answer:
    """One answer under way, of one or more choices. Whoever makes it must close it."""

    def __init__(
        self,
        kind: Kind,
        wanted: Sequence[GenerationRequest],
        telling: Telling,
        *,
        request_id: str,
        model: str,
        fingerprint: str,
        per_prompt: int = 1,
        told: int | None = None,
        new_voice: Callable[[], Voice] | None = None,
    ) -> None:
        """wanted: the choices. model: the name that is served. per_prompt: choices that share a prompt.

        told: how many of them are, those whose tokens are the likeliest; by default all, and in a stream always
        new_voice: what tells a choice's text; that of the kind by default
        """
        self.kind = kind
        self.id = kind.prefix + request_id
        self._request_id = request_id
        self.generations: list[Generation] = []
        self._head = {"id": self.id, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._told = told or per_prompt
        self._wanted = wanted
        self._telling = telling
        self._per_prompt = per_prompt
        self._last: dict[int, Part] = {}
        self._tellers: dict[int, Teller] = {}
        self._voices = [(new_voice or kind.voice)() for _ in wanted]

    async def start(self, generator: Generator) -> None:
        """Open a session for each choice. Raises InvalidRequest, Unavailable."""
        ranked = self._told < self._per_prompt
        asked = [replace(one, logprobs=one.logprobs or 0) if ranked else one for one in self._wanted]
        async for generation in generator.start_all([(one, self._request_id) for one in asked]):
            self.generations.append(generation)

    def close(self) -> None:
        """Free the sessions."""
        for generation in self.generations:
            generation.close()

    async def whole(self) -> bytes:
        """The answer as one body."""
        telling = self._telling
        tokens: list[list[int]] = [[] for _ in self._wanted]
        teller = self._new_teller()
        told = [[teller.nothing()] if one.logprobs is not None else [] for one in self._wanted]
        extras: list[dict[str, Any]] = [{} for _ in self._wanted]
        rounds: list[list[Round]] = [[] for _ in self._wanted]
        likely = [0.0] * len(self._wanted)  # log-probabilities of all tokens
        async for index, part in merged(self.generations):
            if part.logprobs is not None:
                likely[index] += float(part.logprobs.values.sum())
            text, logprobs, extra = self._content(index, part)
            self._voices[index].add(text, part.tokens, last=bool(part.finish))
            tokens[index] += part.tokens
            told[index] += [logprobs] if logprobs else []
            extras[index] |= extra
            rounds[index] += part.rounds
            self._last[index] = part
        choices = [
            {
                "index": index,
                **voice.whole(),
                "logprobs": joined(told[index]) if told[index] else None,
                **self._ending(index, self._last[index]),
                **extras[index],
                **({"token_ids": tokens[index]} if telling.ids else {}),
                **({"speculation": _steps(tokens[index], rounds[index], telling.pieces)} if telling.steps else {}),
            }
            for index, voice in enumerate(self._voices)
        ]
        choices = self._best(choices, [total / max(1, len(own)) for total, own in zip(likely, tokens, strict=True)])
        ending = {"usage": self.usage(), **self._prompt_ids(), **self._metadata(), **self._reports()}
        return orjson.dumps({**self._head, "object": self.kind.whole, "choices": choices, **ending})

    def _best(self, choices: list[dict[str, Any]], likely: Sequence[float]) -> list[dict[str, Any]]:
        """The choices of each prompt that are told, the likeliest first. likely: of a choice's tokens, on average."""
        if self._told == self._per_prompt:
            return choices
        prompts = range(0, len(choices), self._per_prompt)
        groups = (sorted(choices[i : i + self._per_prompt], key=lambda one: -likely[one["index"]]) for i in prompts)
        best = [choice for group in groups for choice in group[: self._told]]
        return [choice | {"index": index} for index, choice in enumerate(best)]

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events, up to [DONE]. Raises the error that ends it."""
        include_usage = self._telling.usage
        head = {**self._head, "object": self.kind.chunk}
        before = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        running = len(self.generations)
        async for index, part in merged(self.generations):
            first = index not in self._last
            text, logprobs, extra = self._content(index, part)
            self._last[index] = part
            if self._telling.usages:
                after = b'],"usage":' + orjson.dumps(self.usage()) + b"}\n\n"
            if first and (opening := self.kind.opening()) is not None:
                behind = b"]," + orjson.dumps(ids)[1:-1] + after[1:] if (ids := self._prompt_ids()) else after
                yield before + orjson.dumps(self._choice(index, opening, None)) + behind
            said = self._voices[index].add(text, part.tokens, last=bool(part.finish))
            if said is not None or self._telling.ids or logprobs or extra or (self._telling.steps and part.rounds):
                choice = self._choice(index, said if said is not None else self.kind.nothing, logprobs, part)
                running -= bool(part.finish)
                if not running and not include_usage and (reports := self._reports()):
                    after = b"]," + orjson.dumps(reports)[1:] + b"\n\n"
                yield before + orjson.dumps(choice | extra) + after
        if include_usage:
            last = {**head, "choices": [], "usage": self.usage(), **self._metadata(), **self._reports()}
            yield b"data: " + orjson.dumps(last) + b"\n\n"
        yield DONE

    def _choice(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None, part: Part | None = None
    ) -> dict[str, Any]:
        """A choice of a chunk; without a part, of the opening one."""
        ending = self._ending(index, part) if part is not None and part.finish else {"finish_reason": None}
        choice = {"index": index, **content, "logprobs": logprobs, **ending}
        if self._telling.ids:
            choice["token_ids"] = part.tokens if part is not None else []
        if self._telling.steps:
            new, rounds = (part.tokens, part.rounds) if part is not None else ([], ())
            choice["speculation"] = _steps(new, rounds, self._telling.pieces)
        return choice

    def _ending(self, index: int, part: Part) -> dict[str, Any]:
        """Why a choice ended. `stop_reason` is the stop string or token of the request, as vLLM has it."""
        matched = part.matched
        named = isinstance(matched, str) or matched in self._wanted[index].stop_token_ids
        reason = self._voices[index].reason(_REASONS[part.finish])
        ending = {"finish_reason": reason, "stop_reason": matched if named else None}
        several = len(self._wanted) > 1 and self._telling.detail != "off"
        return ending | self._report(part) if several else ending

    def _content(self, index: int, part: Part) -> tuple[str, dict[str, Any] | None, dict[str, Any]]:
        """What a part adds to its choice: text, `logprobs`, and further fields."""
        telling = self._telling
        wanted = self._wanted[index]
        told = part.logprobs if wanted.logprobs is not None else None
        extra: dict[str, Any] = {}
        if telling.ids and not self.kind.one_prompt and index not in self._last:
            extra["prompt_token_ids"] = wanted.prompt
        if told is None and not telling.echo and not telling.prompt_logprobs:
            return part.text, None, extra
        text, parts = part.text, []
        teller = self._tellers.setdefault(index, self._new_teller())
        if index not in self._last:
            if telling.echo:
                text = telling.echo[index] + text
            if telling.echo and wanted.logprobs is not None:
                parts.append(teller.prompt(wanted.prompt, part.prompt_logprobs))
            if telling.prompt_logprobs:
                extra["prompt_logprobs"] = prompt_entries(telling.pieces, wanted.prompt, part.prompt_logprobs)
        # Who scores a text has it repeated with a single new token, and takes the last entry for that one's.
        count = len(part.tokens) if telling.ids or telling.echo else part.spoken
        if told is not None and count:
            parts.append(teller.part(part.tokens[:count], told))
        return text, joined(parts) if parts else None, extra

    def _new_teller(self) -> Teller:
        return self.kind.teller(self._telling.pieces, by_id=self._telling.by_id)

    def _prompt_ids(self) -> dict[str, Any]:
        """Beside the choices, if they have one prompt."""
        return {"prompt_token_ids": self._wanted[0].prompt} if self._telling.ids and self.kind.one_prompt else {}

    def _metadata(self) -> dict[str, Any]:
        """Which weights spoke last, under SGLang's names."""
        version = next(reversed([part.weight_version for part in self._last.values()]), "")
        return {"metadata": {"weight_version": version}} if version else {}

    def _reports(self) -> dict[str, Any]:
        """Reports of an answer that is complete; where there are several choices, each has its own."""
        return self._report(self._last[0]) if len(self._wanted) == 1 and self._telling.detail != "off" else {}

    def _report(self, part: Part) -> dict[str, Any]:
        report = part.report
        assert report is not None, "the last part has a report"
        return {"metrics": report.metrics(self._telling.detail), "timings": report.timings()}

    def usage(self) -> dict[str, Any]:
        """Tokens of all choices; a prompt counts once, however many choices it has."""
        parts = self._last.values()
        # By prompt, of its first choice among those that have spoken.
        first = {index // self._per_prompt: self._last[index] for index in sorted(self._last, reverse=True)}.values()
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
                "reasoning_tokens": sum(voice.reasoning_tokens for voice in self._voices),
            },
        }


def _steps(tokens: Sequence[int], rounds: Sequence[Round], pieces: Pieces) -> dict[str, list[Any]]:
    """Step by step: tokens, of which the first `accepted` were drafted, of so many that were verified; their texts, and
    those of the path that the draft believed in most.
    """
    ends = list(itertools.accumulate(one.tokens for one in rounds))
    return {
        "tokens": [one.tokens for one in rounds],
        "verified": [one.verified for one in rounds],
        "accepted": [one.accepted for one in rounds],
        "texts": [
            [pieces.text(token) for token in tokens[end - one.tokens : end]]
            for one, end in zip(rounds, ends, strict=True)
        ],
        "guesses": [[pieces.text(token) for token in one.guess] for one in rounds],
    }
