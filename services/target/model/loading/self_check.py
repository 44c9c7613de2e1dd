"""The start-up check that a model keeps all of its state in the paged cache.

A model may carry a state of its own from token to token (a convolution, a recurrence) beside attention. Its interface
does not show it, and its text would be wrong after every chunked prompt and rejected draft token. So a few tokens are
computed twice, at once and in two chunks: without such a state the logits agree up to rounding.
"""

from __future__ import annotations

import numpy as np
import torch

from outrider.errors import ConfigError
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.messages import OpenSession
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.sampling import SamplingParams, StopConditions
from services.target.model.base import Model
from services.target.step.batch import SessionWork, build

_TOKENS = 12
_CUT = 7  # tokens of the first chunk
# Root mean square of the logits' difference over that of the logits. Rounding errors are far below it, also in
# bfloat16; a lost state changes logits by about their own size.
_TOLERANCE = 0.25


@torch.inference_mode()
def check(model: Model) -> None:
    """Compute tokens at once and in chunks. Raises ConfigError if the logits differ."""
    count = min(_TOKENS, model.context_length)
    if count <= _CUT:
        return
    prefix = PrefixCache(PageAllocator(1, _TOKENS), enabled=False)
    cache = model.new_cache(1, _TOKENS)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, count).astype(np.uint32)
    session = Session(OpenSession(0, tokens, count, SamplingParams(), StopConditions(1)), prefix)
    session.table.reserve(count)

    def last_logits(*stops: int) -> torch.Tensor:
        logits, start = torch.empty(0), 0
        for stop in stops:
            batch = build([SessionWork(Chunk(session, start, stop))], model.device)
            logits, start = model.runner.forward(batch, cache).logits, stop
        return logits[-1].float()

    whole, parts = last_logits(count), last_logits(_CUT, count)
    if not torch.isfinite(whole).all():
        raise ConfigError(
            f"{model.architecture}: the logits are not finite as {str(model.dtype).removeprefix('torch.')}; "
            "choose --dtype bfloat16 or float32"
        )
    spread = (whole - whole.mean()).square().mean().sqrt()
    if (whole - parts).square().mean().sqrt() > _TOLERANCE * spread:
        raise ConfigError(
            f"{model.architecture} carries a state from token to token beside its attention, which is not supported; "
            "choose a model with attention alone"
        )
