"""Sampling parameters for requests that omit them: those of the model's generation_config.json, or OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from outrider.errors import ConfigError, InvalidRequest
from outrider.speculation.sampling import SamplingParams
from outrider.text.tokenizer import load_settings

FILE = "generation_config.json"


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling parameters of a request that omits them. The defaults are OpenAI's, which filter nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name):g}" for field in fields(self))

    def sampling(
        self,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        **others: Any,
    ) -> SamplingParams:
        """A request's parameters; None is omitted. top_k: 0 and -1 keep all tokens. others: as in SamplingParams.

        Raises InvalidRequest.
        """
        return SamplingParams(
            self.temperature if temperature is None else temperature,
            self.top_k if top_k is None else max(top_k, 0),
            self.top_p if top_p is None else top_p,
            self.min_p if min_p is None else min_p,
            repetition_penalty=self.repetition_penalty if repetition_penalty is None else repetition_penalty,
            **others,
        )


OPENAI = SamplingDefaults()


def of_model(files: Mapping[str, bytes]) -> SamplingDefaults:
    """The parameters of the checkpoint's generation_config.json. files: content by name. Raises ConfigError."""
    settings = load_settings(files, FILE)
    given = {field.name: settings[field.name] for field in fields(OPENAI) if settings.get(field.name) is not None}
    try:
        params = OPENAI.sampling(**{name: _number(name, value) for name, value in given.items()})
    except InvalidRequest as error:
        raise ConfigError(f"the model's {FILE}: {error}; correct it, or set --sampling-defaults openai") from None
    return SamplingDefaults(**{field.name: getattr(params, field.name) for field in fields(OPENAI)})


def _number(name: str, value: Any) -> Any:
    """A value of the file in the type of its field; an integer may be written as 50.0. Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, not {json.dumps(value)}")
    if name == "top_k" and isinstance(value, float):
        if not value.is_integer():
            raise InvalidRequest(f"{name} must be a whole number, not {value}")
        return int(value)
    return value
