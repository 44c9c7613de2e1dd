"""Sizes of a target's steps, from its flags: tokens, sampled rows, and rows of the steps captured as CUDA graphs."""

from __future__ import annotations

from outrider.config import TargetConfig
from outrider.placement.memory import StepSizes

# Tokens of a step without a flag. A chunk delays the sessions that decode, so it is as short as it can be
# without making long prompts slower: this many tokens keep a CPU busy, a GPU needs more.
DEFAULT_CHUNK = {"cpu": 128, "cuda": 2048}

# Default numbers of rows of captured steps; above them every eighth number.
_SMALL = (1, 2, 4, 8, 12)
_EVERY = 8
_MOST_ROWS = 512
# Most verified rows of a captured step if no flag fixes them.
_ADAPTIVE_ROWS = 64


def captured_rows(config: TargetConfig) -> list[int]:
    """Rows of the steps to capture: one a session without draft tokens, or the fixed number of a flag."""
    most = config.cuda_graph_max_bs or config.max_running_requests
    if config.cuda_graph_bs is not None:
        sessions = [count for count in config.cuda_graph_bs if count <= (config.cuda_graph_max_bs or count)]
    elif config.disable_cuda_graph_padding:
        sessions = list(range(1, most + 1))
    else:
        sessions = [*(size for size in _SMALL if size < most), *range(_EVERY * 2, most, _EVERY), most]
    fixed = config.fixed_tokens_per_session
    if fixed is not None:
        rows = [*sessions, *(count * fixed for count in sessions)]
    elif config.cuda_graph_bs is None:
        rows = [*sessions, *range(_EVERY * 2, _ADAPTIVE_ROWS + 1, _EVERY)]
    else:
        rows = sessions
    return sorted({count for count in rows if count <= _MOST_ROWS})


def step_sizes(config: TargetConfig, hidden: int, vocab: int) -> StepSizes:
    """What the working memory of a target on an accelerator depends on. hidden, vocab: widths of state and logits."""
    running, fixed = config.max_running_requests, config.fixed_tokens_per_session
    chunk = config.chunked_prefill_size or DEFAULT_CHUNK["cuda"]
    tokens = config.max_prefill_tokens if chunk < 0 else max(chunk, running)
    sampled = running * fixed if fixed is not None else running + _ADAPTIVE_ROWS
    captured = () if config.disable_cuda_graph else tuple(captured_rows(config))
    return StepSizes(tokens, sampled, captured, hidden, vocab)
