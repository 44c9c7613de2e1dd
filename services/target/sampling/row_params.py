"""Sampling parameters of a step's rows: laid out session by session on the host, sent to the device in one transfer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.speculation import noise
from outrider.speculation.sampling import SamplingParams
from services.target.step.upload import UploadBatch


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters of R rows. Tensors are on the device, flags on the host.

    If all rows are greedy, the tensors are empty except those of banned tokens.

    temperature: [R] float64, 1 for greedy rows; greedy: [R] bool
    top_k: [R] int64, 0 is off; top_p, min_p: [R] float64, 1 and 0 are off
    keys: [R, 2] int64, the noise keys of the sampled positions
    banned_rows, banned_tokens: [B] int64, pairs that cannot be sampled
    """

    temperature: Tensor
    greedy: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    banned_rows: Tensor
    banned_tokens: Tensor
    all_greedy: bool = field(kw_only=True)
    any_filter: bool = field(kw_only=True)
    any_top_p_alone: bool = field(kw_only=True)
    max_top_k: int = field(kw_only=True)

    @property
    def may_be_unresolved(self) -> bool:
        """True if `sample_adjusted` may return UNRESOLVED without waiting."""
        return self.any_top_p_alone and not self.all_greedy


@dataclass(frozen=True)
class RowRequest:
    """Sampling parameters of one session's rows.

    positions: absolute positions of the sampled tokens, one a row; banned: for each row, token ids excluded
    keyed: False if only the device knows the positions, and so the noise keys
    """

    params: SamplingParams
    positions: Sequence[int]
    banned: Sequence[Sequence[int]]
    keyed: bool = True


def gather(requests: Sequence[RowRequest], device: torch.device) -> RowParams:
    """Lay out the sessions' requests row by row, on the device."""
    uploads = UploadBatch()
    rows = lay_out(requests, uploads)
    uploads.send(device)
    return rows()


def lay_out(requests: Sequence[RowRequest], uploads: UploadBatch) -> Callable[[], RowParams]:
    """As `gather`, as part of a larger upload. The result may be called once the upload is sent."""
    counts = [len(request.positions) for request in requests]
    params = [request.params for request in requests]

    def column(values: Sequence[float], dtype: type) -> NDArray[np.generic]:
        return np.repeat(np.array(values, dtype=dtype), counts)

    keys = [
        noise.position_keys(r.params.seed, np.array(r.positions))
        if r.keyed
        else np.zeros((len(r.positions), 2), np.uint32)
        for r in requests
        if not r.params.greedy
    ]
    all_keys = np.zeros((sum(counts), 2), dtype=np.int64)
    noisy = np.repeat([not p.greedy for p in params], counts)
    if keys:
        all_keys[noisy] = np.concatenate(keys)
    banned = [tokens for request in requests for tokens in request.banned]
    pairs = np.array([(row, token) for row, tokens in enumerate(banned) for token in tokens], np.int64).reshape(-1, 2)
    random = [p for p in params if not p.greedy]
    columns = [
        column([1.0 if p.greedy else p.temperature for p in params], np.float64),
        column([p.greedy for p in params], np.bool_),
        column([p.top_k for p in params], np.int64),
        column([p.top_p for p in params], np.float64),
        column([p.min_p for p in params], np.float64),
        all_keys,
        pairs[:, 0].copy(),
        pairs[:, 1].copy(),
    ]
    if not random:  # greedy sampling reads none of these
        columns[:6] = [column[:0] for column in columns[:6]]
    placed = uploads.add(columns)
    return lambda: RowParams(
        *placed(),
        all_greedy=not random,
        any_filter=any(p.top_k or p.top_p < 1.0 or p.min_p > 0.0 for p in random),
        any_top_p_alone=any((p.top_p < 1.0 or p.min_p > 0.0) and not p.top_k for p in random),
        max_top_k=max((p.top_k for p in random), default=0),
    )
