"""What the flags allow: thresholds, sizes of a step and of the queue, speculation modes."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from outrider.config import TargetConfig
from outrider.placement.step_sizes import DEFAULT_CHUNK
from outrider.serving.portions import Limits
from outrider.speculation.acceptance import Thresholds
from services.target.model.base import Model
from services.target.sampling.logprobs import scored_rows
from services.target.speculation.modes.mode import DRAFT_MODES, SpeculationMode
from services.target.speculation.modes.policy import MEASURING_MODES

log = logging.getLogger(__name__)


def thresholds(config: TargetConfig) -> Thresholds:
    """Acceptance thresholds; a warning is logged where they are lossy."""
    chosen = Thresholds(config.speculative_accept_threshold_single, config.speculative_accept_threshold_acc)
    if not chosen.exact:
        log.warning("acceptance thresholds below 1 are lossy: draft tokens can change sampled text")
    return chosen


def scheduling(config: TargetConfig, vocab_size: int, device: torch.device) -> Limits:
    """Limits of a step and of the queue. A chunk is never shorter than the roots of all sessions together."""
    chunk = config.chunked_prefill_size or DEFAULT_CHUNK[device.type]
    return Limits(
        config.max_running_requests,
        None if chunk < 0 else max(chunk, config.max_running_requests),
        config.max_prefill_tokens,
        config.max_queued_requests,
        config.schedule_policy,
        scored_rows(vocab_size),
    )


def open_modes(modes: Collection[SpeculationMode], config: TargetConfig, model: Model) -> list[SpeculationMode]:
    """The speculation modes that the model supports and the flags leave open, the one to begin with first."""
    if config.verifies_all_draft_tokens:
        modes = MEASURING_MODES if config.speculative_always else DRAFT_MODES
    own = model.prompt_lookup and SpeculationMode.SELF_SPECULATE in modes
    unused = SpeculationMode.NONE if own else SpeculationMode.SELF_SPECULATE
    opened = [mode for mode in modes if mode is not unused]
    if model.prompt_lookup:
        opened.sort(key=lambda mode: mode in DRAFT_MODES)
    return opened
