"""Which drafter serves a model if nobody says: the head that comes along for it beside n-grams, or these alone.

A folder beside this file is an EAGLE-3 head of the default model, as `outrider train` writes it, with its report.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from outrider.config import DEFAULT_MODEL, Algorithm, DraftOptions
from outrider.errors import ConfigError

DEFAULT_HEAD = Path(__file__).with_name("smollm2-135m-instruct-eagle3")

Options = TypeVar("Options", bound=DraftOptions)


def has_head(model_path: str | None) -> bool:
    """True if a head comes along for a model."""
    return model_path == DEFAULT_MODEL and DEFAULT_HEAD.is_dir()


def with_drafter(options: Options, model_path: str | None) -> Options:
    """The same options with a drafter in the place of AUTO, and the head that comes along where none is named.

    model_path: of the target. Raises ConfigError for a draft that is named without its algorithm.
    """
    named = options.speculative_draft_model_path is not None
    known = has_head(model_path) and not named
    if options.speculative_algorithm == "AUTO":
        if named:
            raise ConfigError("--speculative-draft-model-path needs --speculative-algorithm, which says what it is")
        beside = known or options.speculative_ngram_beside  # they know what a head does not: texts that repeat
        algorithm: Algorithm = "EAGLE3" if known else "NGRAM"
        options = replace(options, speculative_algorithm=algorithm, speculative_ngram_beside=beside)
    if options.speculative_algorithm == "EAGLE3" and known:
        options = replace(options, speculative_draft_model_path=str(DEFAULT_HEAD))
    return options
