"""Numbers and rules of a request, as the services' messages have them."""

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

# A service's name of a constraint, and the field of REST that means the same.
_CONSTRAINTS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "ebnf_grammar": "ebnf",
    "choice": "guided_choice",
    "json_object": "response_format",
}


def number(value: float) -> float:
    """The number that the caller wrote: the shortest that a field of 32 bits tells from its neighbours.

    Otherwise 0.7 would be 0.699999988, and a text could differ from the one that REST gives.
    """
    return float(str(np.float32(value)))


def sampling_of(params: Any, temperature: float, top_k: int, bias: Iterable[tuple[int, float]]) -> SamplingParams:
    """How tokens are drawn. A top_p or repetition_penalty of 0 is taken as unset. Raises InvalidRequest."""
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
    """What the text must match. Raises InvalidRequest."""
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


def tokens_limit(params: Any, name: str) -> int | None:
    """A limit of new tokens; None is the rest of the context, 0 tells of the prompt alone."""
    return int(getattr(params, name)) if params.HasField(name) else None


def likeliest(count: int, name: str) -> int:
    """How many of the likeliest tokens are told of. Raises InvalidRequest."""
    if not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must lie in [0, {MAX_LOGPROBS}], not {count}", param=name)
    return count


def name_of(request: Any) -> str:
    """What Abort calls it."""
    return request.request_id or f"gen-{secrets.token_hex(12)}"


def refuse_unsupported(request: Any, names: Iterable[str]) -> None:
    """Raise InvalidRequest if a request has one of some fields, or asks for a rank of its own."""
    given = {described.name for described, _ in request.ListFields()}
    for name in names:
        if name in given:
            raise InvalidRequest(f"`{name}` is not supported by this server; leave it out", param=name)
    if request.data_parallel_rank:
        raise InvalidRequest("there is one rank, 0", param="data_parallel_rank")


def choices(request: GenerationRequest, n: int) -> list[GenerationRequest]:
    """A request once for each choice, whose seeds follow one another. n: 0 is 1. Raises InvalidRequest."""
    if n > MAX_CHOICES:
        raise InvalidRequest(f"n must be at most {MAX_CHOICES}, not {n}", param="n")
    return request.choices(n or 1)
