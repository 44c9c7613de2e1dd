"""Conversion of request fields that the facades' messages share."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np

from gateway.api.requests.grammars import grammar_of
from gateway.sessions.request import GenerationRequest
from outrider.errors import InvalidRequest
from outrider.serving.messages import MAX_LOGPROBS, Grammar
from outrider.speculation.sampling import SamplingParams

MAX_CHOICES = 128

# Names of constraints in the messages, and the equivalent REST fields.
_CONSTRAINTS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "ebnf_grammar": "ebnf",
    "choice": "guided_choice",
    "json_object": "response_format",
}


def number(value: float) -> float:
    """The decimal number that the caller meant: the shortest one that rounds to the same 32-bit float.

    Otherwise 0.7 would become 0.699999988, and a sampled text could differ from that of REST.
    """
    return float(str(np.float32(value)))


def sampling_of(params: Any, temperature: float, top_k: int, bias: Iterable[tuple[int, float]]) -> SamplingParams:
    """Sampling parameters. A top_p or repetition_penalty of 0 counts as unset. Raises InvalidRequest."""
    return SamplingParams(
        number(temperature),
        max(top_k, 0),
        number(params.top_p) or 1.0,
        number(params.min_p),
        presence_penalty=number(params.presence_penalty),
        frequency_penalty=number(params.frequency_penalty),
        repetition_penalty=number(params.repetition_penalty) or 1.0,
        logit_bias=tuple((token, number(value)) for token, value in bias),
    )


def grammar(params: Any) -> Grammar | None:
    """The grammar of the answer. Raises InvalidRequest."""
    name = params.WhichOneof("constraint")
    if name is None:
        return None
    if name not in _CONSTRAINTS:
        raise InvalidRequest(f"`{name}` is not supported by this server; leave it out", param=name)
    value: Any = getattr(params, name)
    if name == "choice":
        value = list(value.choices)
    elif name == "json_object":
        value = {"type": "json_object" if value else "text"}
    return grammar_of({_CONSTRAINTS[name]: value})


def max_tokens_of(params: Any, name: str) -> int | None:
    """New tokens at most; None is the rest of the context, 0 returns the prompt's log-probabilities only."""
    return int(getattr(params, name)) if params.HasField(name) else None


def logprobs_count(count: int, name: str) -> int:
    """Number of likeliest tokens to return, checked. Raises InvalidRequest."""
    if not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must lie in [0, {MAX_LOGPROBS}], not {count}", param=name)
    return count


def name_of(request: Any) -> str:
    """The request's id, for Abort."""
    return request.request_id or f"gen-{secrets.token_hex(12)}"


def refuse_unsupported(request: Any, names: Iterable[str]) -> None:
    """Raise InvalidRequest if a request sets one of these fields, or a data-parallel rank."""
    given = {described.name for described, _ in request.ListFields()}
    for name in names:
        if name in given:
            raise InvalidRequest(f"`{name}` is not supported by this server; leave it out", param=name)
    if request.data_parallel_rank:
        raise InvalidRequest("there is one rank, 0", param="data_parallel_rank")


def choices(request: GenerationRequest, n: int) -> list[GenerationRequest]:
    """A request once for each choice, with consecutive seeds. n: 0 is 1. Raises InvalidRequest."""
    if n > MAX_CHOICES:
        raise InvalidRequest(f"n must be at most {MAX_CHOICES}, not {n}", param="n")
    return request.choices(n or 1)
