"""What the flags allow: sizes of a step, of sessions and of the pool, speculation modes. Wrong values are refused by
name."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from outrider.config import TargetConfig, check_minimum
from outrider.errors import ConfigError
from outrider.placement.step_sizes import DEFAULT_CHUNK
from outrider.serving.scheduler import Limits
from outrider.speculation.acceptance import Thresholds
from services.target.model.base import Model
from services.target.sampling.logprobs import scored_rows
from services.target.speculation.mode_policy import MEASURING_MODES
from services.target.speculation.mode_selector import DRAFT_MODES, SpeculationMode

log = logging.getLogger(__name__)

_LEAST = {
    "page_size": 1,
    "max_running_requests": 1,
    "max_prefill_tokens": 1,
    "max_queued_requests": 0,
    "coalesce_seconds": 0,
    "decode_log_interval": 1,
    "draft_headroom_bytes": 0,
    "max_total_tokens": 1,
    "speculative_num_steps": 0,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 1,
}


def check_limits(config: TargetConfig) -> None:
    """Raise ConfigError for numbers that make no sense."""
    chunk = config.chunked_prefill_size
    if chunk is not None and chunk < 1 and chunk != -1:
        raise ConfigError(f"--chunked-prefill-size must be 1 or more, or -1 for no cutting, not {chunk}")
    check_minimum(config, _LEAST)
    fraction = config.mem_fraction_static
    if fraction is not None and not 0.0 < fraction <= 1.0:
        raise ConfigError(f"--mem-fraction-static must lie in (0, 1], not {fraction}")


def thresholds(config: TargetConfig) -> Thresholds:
    """Acceptance thresholds; a warning is logged where they are lossy. Raises ConfigError."""
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if not 0.0 <= getattr(config, name) <= 1.0:
            raise ConfigError(f"--{name.replace('_', '-')} must lie in [0, 1], not {getattr(config, name)}")
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
