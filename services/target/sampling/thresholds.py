"""Acceptance thresholds below 1: drafted tokens are accepted more often than the model draws them.

Lossy, and only for sampled sessions; with the default thresholds nothing here runs. See Thresholds for the rule.
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
    """The drawn tokens, some of which are replaced by a drafted one. Waits for the device.

    logits: [R, V], adjusted; tokens: [R] int64, drawn after them; works, requests: the sessions, row after row.
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
