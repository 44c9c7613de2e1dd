"""The requests of the soak: a fixed set with seeds, so that each one's answer is known from its first time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_OPENINGS = (
    "Write a short story about",
    "Explain in two sentences",
    "List five facts about",
    "Say something kind about",
)
_THINGS = (
    "the sea",
    "a lighthouse",
    "prime numbers",
    "Zürich",
    "bread",
    "日本",
    "trains",
    "rain",
    "an old clock",
    "bees",
)
_SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}  # fmt: skip
_CITY = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]}
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": _CITY}}
_LONG = "The quick brown fox jumps over the lazy dog. " * 20  # a prefix that several requests share


@dataclass(frozen=True)
class Request:
    """leaves: the client disconnects after some chunks, so that nothing can be compared."""

    kind: str
    path: str
    body: dict[str, Any]
    leaves: bool = False


def requests(count: int, seed: int) -> list[Request]:
    """Requests of all kinds, in turn."""
    dice = random.Random(seed)
    return [_KINDS[index % len(_KINDS)](dice, index) for index in range(count)]


def _prompt(dice: random.Random) -> str:
    return f"{dice.choice(_OPENINGS)} {dice.choice(_THINGS)}."


def _common(dice: random.Random, index: int) -> dict[str, Any]:
    return {"max_tokens": dice.choice((8, 24, 60)), "temperature": dice.choice((0.0, 0.8)), "seed": index}


def _chat(dice: random.Random, index: int) -> Request:
    messages = [{"role": "user", "content": _prompt(dice)}]
    return Request("chat", "/v1/chat/completions", _common(dice, index) | {"messages": messages, "stream": True})


def _long_chat(dice: random.Random, index: int) -> Request:
    messages = [{"role": "system", "content": _LONG}, {"role": "user", "content": _prompt(dice)}]
    return Request("shared prefix", "/v1/chat/completions", _common(dice, index) | {"messages": messages})


def _choices(dice: random.Random, index: int) -> Request:
    body = _common(dice, index) | {"prompt": [_prompt(dice), _prompt(dice)], "n": 2, "stop": ["\n\n", "The end"]}
    return Request("choices and stop strings", "/v1/completions", body)


def _logprobs(dice: random.Random, index: int) -> Request:
    body = _common(dice, index) | {"prompt": _prompt(dice), "logprobs": 3, "echo": True, "stream": True}
    return Request("log-probabilities", "/v1/completions", body)


def _schema(dice: random.Random, index: int) -> Request:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA | {"title": str(index)}}}
    body = _common(dice, index) | {
        "messages": [{"role": "user", "content": "A person as JSON."}],
        "response_format": form,
    }
    return Request("JSON schema", "/v1/chat/completions", body)


def _regex(dice: random.Random, index: int) -> Request:
    return Request(
        "regex", "/v1/completions", _common(dice, index) | {"prompt": "A date: ", "regex": r"\d{4}-\d{2}-\d{2}"}
    )


def _tool(dice: random.Random, index: int) -> Request:
    messages = [{"role": "user", "content": "What is the weather in Bern?"}]
    body = _common(dice, index) | {"messages": messages, "tools": [_TOOL], "tool_choice": "required", "max_tokens": 60}
    return Request("forced tool call", "/v1/chat/completions", body | {"stream": True})


def _native(dice: random.Random, index: int) -> Request:
    common = _common(dice, index)
    sampling = {"max_new_tokens": common["max_tokens"], "temperature": common["temperature"], "sampling_seed": index}
    return Request("SGLang's API", "/generate", {"text": _prompt(dice), "sampling_params": sampling})


def _penalties(dice: random.Random, index: int) -> Request:
    body = _common(dice, index) | {
        "prompt": _prompt(dice),
        "frequency_penalty": 0.5,
        "logit_bias": {"5": -5},
        "top_k": 40,
    }
    return Request("penalties", "/v1/completions", body | {"min_tokens": 4})


def _plain(dice: random.Random, index: int) -> Request:
    body = _common(dice, index) | {"prompt": _prompt(dice), "speculation": "off"}
    return Request("without speculation", "/v1/completions", body)


def _leaving(dice: random.Random, index: int) -> Request:
    body = _common(dice, index) | {"prompt": _prompt(dice), "max_tokens": 200, "ignore_eos": True, "stream": True}
    return Request("leaves early", "/v1/completions", body, leaves=True)


def _response(dice: random.Random, index: int) -> Request:
    common = _common(dice, index)
    body = {"input": _prompt(dice), "max_output_tokens": common["max_tokens"], "temperature": 0.0}
    return Request("responses", "/v1/responses", body)


_KINDS: tuple[Callable[[random.Random, int], Request], ...] = (
    _chat, _long_chat, _choices, _logprobs, _schema, _regex, _tool, _native, _penalties, _plain, _leaving, _response,
)  # fmt: skip
