"""Acceptance thresholds below 1: draft tokens are accepted more often than the model samples them.

Lossy, and only for sessions with temperature above 0; with the default thresholds nothing here runs. `Thresholds` has
the rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.speculation import noise
from outrider.speculation.acceptance import Thresholds
from services.target.sampling import sampler
from services.target.sampling.row_params import RowParams, RowRequest
from services.target.step.batch import SessionWork


def relax(
    thresholds: Thresholds,
    logits: Tensor,
    rows: RowParams,
    tokens: Tensor,
    works: Sequence[SessionWork],
    requests: Sequence[RowRequest],
) -> Tensor:
    """Replace some of the sampled tokens by a draft token. Waits for the device. Returns [R] int64.

    logits: [R, V], adjusted; tokens: [R] int64, the samples; works, requests: the sessions, row after row.
    """
    lenient: list[tuple[int, SessionWork, RowRequest]] = []
    first = 0
    for work, request in zip(works, requests, strict=True):
        if len(work.draft) and not request.params.greedy:
            lenient.append((first, work, request))
        first += len(work.draft) + 1
    if not lenient:
        return tokens
    parents = np.concatenate([row + 1 + work.draft.parents.astype(np.int64) for row, work, _ in lenient])
    nodes = np.concatenate([work.draft.tokens.astype(np.int64) for _, work, _ in lenient])
    place = (torch.from_numpy(parents).to(logits.device), torch.from_numpy(nodes).to(logits.device))
    probabilities = sampler.probabilities(logits, rows, *place).cpu().numpy()
    drawn = tokens.cpu().numpy().copy()
    node = 0
    for row, work, request in lenient:
        part, count = slice(row, row + len(work.draft) + 1), len(work.draft)
        coins = noise.coins(request.params.seed, np.array(request.positions))
        drawn[part] = thresholds.relax(work.draft, drawn[part], probabilities[node : node + count], coins)
        node += count
    return torch.from_numpy(drawn).to(tokens.device)
