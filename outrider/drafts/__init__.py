"""Bundled draft heads, and the drafter for --speculative-algorithm AUTO.

A folder beside this file holds an EAGLE-3 head of the default model, as `outrider train` writes it, with its report.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from outrider.config import DEFAULT_MODEL, Algorithm, DraftOptions
from outrider.errors import ConfigError

DEFAULT_HEAD = Path(__file__).with_name("smollm2-135m-instruct-eagle3")

Options = TypeVar("Options", bound=DraftOptions)


def has_bundled_head(model_path: str | None) -> bool:
    """True if a draft head for the model is bundled."""
    return model_path == DEFAULT_MODEL and DEFAULT_HEAD.is_dir()


def resolve_drafter(options: Options, model_path: str | None) -> Options:
    """The same options with AUTO replaced by a drafter, and EAGLE3 without a draft model by the bundled head.

    AUTO is the bundled head beside NGRAM, or NGRAM alone. model_path: of the target. Raises ConfigError for a draft
    model without an algorithm.
    """
    named = options.speculative_draft_model_path is not None
    known = has_bundled_head(model_path) and not named
    if options.speculative_algorithm == "AUTO":
        if named:
            raise ConfigError("--speculative-draft-model-path needs --speculative-algorithm; name the algorithm, too")
        beside = known or options.speculative_ngram_beside  # n-grams find repeated text, which a head does not
        algorithm: Algorithm = "EAGLE3" if known else "NGRAM"
        options = replace(options, speculative_algorithm=algorithm, speculative_ngram_beside=beside)
    if options.speculative_algorithm == "EAGLE3" and known:
        options = replace(options, speculative_draft_model_path=str(DEFAULT_HEAD))
    return options
