"""The drafter and the self-speculation of `outrider serve`: what AUTO is on this machine."""

from __future__ import annotations

import logging
from dataclasses import replace

from outrider.config import ServeConfig
from outrider.drafts import has_bundled_head, resolve_drafter
from outrider.placement.cores import choose_cores, draft_has_own_place

log = logging.getLogger(__name__)


def choose_drafters(config: ServeConfig) -> ServeConfig:
    """The same configuration with AUTO replaced by a drafter for this machine (`outrider.drafts.resolve_drafter`).

    Self-speculation in the target stays on beside AUTO. With an explicit --speculative-algorithm it is off, unless a
    flag asks for it.

    Raises ConfigError for a draft model without an algorithm, and for CPU cores that the machine does not have.
    """
    draft, target = config.draft, config.target
    if draft.speculative_algorithm != "AUTO":
        if target.self_speculation == "auto":
            config = replace(config, target=replace(target, self_speculation="off"))
        return replace(config, draft=resolve_drafter(draft, target.model_path))
    own_place = draft_has_own_place(choose_cores(config), target_device=target.device, draft_device=draft.draft_device)
    chosen = resolve_drafter(draft, target.model_path, own_place=own_place)
    if chosen.speculative_algorithm == "NGRAM" and has_bundled_head(target.model_path):
        log.info(
            "NGRAM drafts, because the draft service shares its cores with the target; "
            "--speculative-algorithm EAGLE3 drafts with the bundled head"
        )
    return replace(config, draft=chosen)
