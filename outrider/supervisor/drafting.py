"""Who drafts in `outrider serve`, if nobody says: a draft service, the target itself, or both."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from outrider.config import DraftOptions, ServeConfig
from outrider.drafts import has_head, with_drafter
from outrider.placement.cores import choose_cores

log = logging.getLogger(__name__)

# Flags that ask for trees, and those with which a target is no compiled program, which alone drafts by itself.
_OF_TREES = "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"
_OF_TARGETS = "attention_backend", "enable_torch_compile", "tp_size", "speculative_always"
_GPU = Path("/dev/nvidiactl")


def choose_drafters(config: ServeConfig) -> ServeConfig:
    """The same configuration with a drafter in the place of AUTO, or none.

    Raises ConfigError for a draft that is named without its algorithm, and for cores that are not there.
    """
    chosen = replace(_with_self_draft(config), draft=with_drafter(config.draft, config.target.model_path))
    if config.draft.speculative_algorithm != "AUTO" or not _drafts_alone(config, chosen):
        return chosen
    log.info(
        "no draft service: on its cores the target drafts better by itself; --speculative-algorithm EAGLE3 starts one"
    )
    return replace(config, draft=replace(config.draft, speculative_algorithm="NONE"))


def _with_self_draft(config: ServeConfig) -> ServeConfig:
    """Where a drafter is named, or none is wanted, the target drafts by itself only if that is said, too."""
    if config.target.self_draft != "auto" or config.draft.speculative_algorithm == "AUTO":
        return config
    return replace(config, target=replace(config.target, self_draft="off"))


def _drafts_alone(config: ServeConfig, chosen: ServeConfig) -> bool:
    """True for the default model on a CPU whose cores its head would share, as long as no flag asks for either.

    Measured in bfloat16 and int8: what the head brings beside the target's own drafts is less than what its trials
    cost (docs/decisions/0020-the-target-alone-on-shared-cores.md).
    """
    target = config.target
    if not has_head(target.model_path) or target.self_draft == "off" or not _unsaid(target, *_OF_TARGETS):
        return False
    if config.draft != DraftOptions() or not _unsaid(config.shared, *_OF_TREES):
        return False
    if config.listen_draft is not None or config.cores_draft is not None:
        return False
    on_cpu = target.device == "cpu" or (target.device == "auto" and not _GPU.exists())
    return on_cpu and choose_cores(chosen).together


def _unsaid(options: object, *names: str) -> bool:
    """True if some flags are as they are by default."""
    usual = type(options)()
    return all(getattr(options, name) == getattr(usual, name) for name in names)
