"""Bundled draft heads, and the drafter for --speculative-algorithm AUTO.

A folder beside this file holds an EAGLE-3 head of the default model, as `outrider train` writes it, with its report.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from outrider.checkpoints.drafts import has_mtp_layers, kind_of_draft, local_folder
from outrider.config import DEFAULT_MODEL, Algorithm, DraftOptions
from outrider.config.draft import DraftCacheOptions, DraftModelOptions, OnlineOptions
from outrider.errors import ConfigError

DEFAULT_HEAD = Path(__file__).with_name("smollm2-135m-instruct-eagle3")

Options = TypeVar("Options", bound=DraftOptions)


def has_bundled_head(model_path: str | None) -> bool:
    """True if a draft head for the model is bundled."""
    return model_path == DEFAULT_MODEL and DEFAULT_HEAD.is_dir()


def resolve_drafter(options: Options, model_path: str | None, *, own_place: bool = True) -> Options:
    """The same options with AUTO replaced by a drafter, and EAGLE3 without a draft model by the bundled head.

    model_path: of the target. own_place: the draft service has a device or CPU cores that the target does not use.
    Raises ConfigError for a draft model that is not on this machine and has no algorithm.
    """
    if options.speculative_algorithm == "AUTO":
        options = _automatic(options, model_path, own_place)
    named = options.speculative_draft_model_path is not None
    if options.speculative_algorithm == "EAGLE3" and has_bundled_head(model_path) and not named:
        options = replace(options, speculative_draft_model_path=str(DEFAULT_HEAD))
    return options


def _automatic(options: Options, model_path: str | None, own_place: bool) -> Options:
    """The drafter for AUTO. Every choice proposes; only --speculative-algorithm NONE starts no draft service.

    A draft model that a flag names is used wherever it computes; its files say which algorithm reads it. A model's own
    head drafts best, but each of its steps takes as long as a part of the target's. It is chosen where it computes on a
    device or on cores of its own, or where flags of a draft model ask for one. On the target's cores NGRAM drafts: a
    lookup takes microseconds, and at rest it uses no core.
    """
    if options.speculative_draft_model_path is not None:
        return replace(options, speculative_algorithm=_algorithm_of(options.speculative_draft_model_path))
    if own_place or _asks_for_model(options):
        if has_bundled_head(model_path):
            # N-grams find repeated text, which a head does not.
            return replace(options, speculative_algorithm="EAGLE3", speculative_ngram_beside=True)
        if (folder := local_folder(model_path)) is not None and has_mtp_layers(folder):
            return replace(options, speculative_algorithm="NEXTN")
    return replace(options, speculative_algorithm="NGRAM")


def _algorithm_of(draft_model_path: str) -> Algorithm:
    """The algorithm of a draft model. Raises ConfigError if its files are not on this machine."""
    if draft_model_path.endswith(".gguf"):
        return "STANDALONE"
    folder = local_folder(draft_model_path)
    if folder is None:
        raise ConfigError(
            f"--speculative-draft-model-path {draft_model_path} is not on this machine, so its algorithm is unknown; "
            "name it with --speculative-algorithm"
        )
    return kind_of_draft(folder)


def _asks_for_model(options: DraftOptions) -> bool:
    """True if a flag is set that only a draft model has, or one that adds NGRAM to a draft model."""
    flags = [flag for part in (DraftModelOptions, DraftCacheOptions, OnlineOptions) for flag in fields(part)]
    return options.speculative_ngram_beside or any(getattr(options, flag.name) != flag.default for flag in flags)
