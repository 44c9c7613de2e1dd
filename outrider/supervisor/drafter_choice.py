"""The drafter of `outrider serve` without --speculative-algorithm: a draft service, self-speculation, or both."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from outrider.config import DraftOptions, ServeConfig
from outrider.drafts import has_bundled_head, resolve_drafter
from outrider.placement.cores import choose_cores

log = logging.getLogger(__name__)

# Flags of the draft tree, and flags with which the target is no compiled program and so cannot self-speculate.
_TREE_FLAGS = "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"
_TARGET_FLAGS = "attention_backend", "enable_torch_compile", "tp_size", "speculative_always"
_GPU = Path("/dev/nvidiactl")


def choose_drafters(config: ServeConfig) -> ServeConfig:
    """The same configuration with AUTO replaced by a drafter or by NONE.

    Raises ConfigError for a draft model without an algorithm, and for CPU cores that the machine does not have.
    """
    chosen = replace(_with_self_speculation(config), draft=resolve_drafter(config.draft, config.target.model_path))
    if config.draft.speculative_algorithm != "AUTO" or not _self_speculates_alone(config, chosen):
        return chosen
    log.info(
        "no draft service: on shared cores self-speculation in the target is faster; "
        "--speculative-algorithm EAGLE3 starts a draft service"
    )
    return replace(config, draft=replace(config.draft, speculative_algorithm="NONE"))


def _with_self_speculation(config: ServeConfig) -> ServeConfig:
    """With an explicit --speculative-algorithm, self-speculation is off unless a flag asks for it."""
    if config.target.self_speculation != "auto" or config.draft.speculative_algorithm == "AUTO":
        return config
    return replace(config, target=replace(config.target, self_speculation="off"))


def _self_speculates_alone(config: ServeConfig, chosen: ServeConfig) -> bool:
    """True for the default model on a CPU whose cores the draft service would share, unless a flag asks for a drafter.

    Measured in bfloat16 and int8: on shared cores the draft service gains less beside self-speculation than the trials
    of the mode selector cost (docs/decisions/0020-self-speculation-on-shared-cores.md).
    """
    target = config.target
    if (
        not has_bundled_head(target.model_path)
        or target.self_speculation == "off"
        or not _are_default(target, *_TARGET_FLAGS)
    ):
        return False
    if config.draft != DraftOptions() or not _are_default(config.shared, *_TREE_FLAGS):
        return False
    if config.listen_draft is not None or config.cores_draft is not None:
        return False
    on_cpu = target.device == "cpu" or (target.device == "auto" and not _GPU.exists())
    return on_cpu and choose_cores(chosen).together


def _are_default(options: object, *names: str) -> bool:
    """True if some flags have their default values."""
    default = type(options)()
    return all(getattr(options, name) == getattr(default, name) for name in names)
