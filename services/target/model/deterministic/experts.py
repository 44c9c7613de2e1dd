"""The experts of a layer as grouped products, for models of `transformers` that use its experts interface.

Registered once; a model that is loaded with `NAME` calls it inside the mode of
invariant_mode.py, whose kernels it uses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from services.target.model.deterministic.invariant_mode import BatchInvariantMode

NAME = "outrider_rows"


def _forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts interface of `transformers`. hidden_states: [T, H]; the others [T, k]. Returns [T, H].

    A row's experts are added up in the order in which its router names them.
    """
    rows, chosen = top_k_index.shape
    expert, order = top_k_index.reshape(-1).sort(stable=True)
    counts = torch.zeros(experts.num_experts, dtype=torch.int64, device=expert.device)
    counts.index_add_(0, expert, torch.ones_like(expert))
    x = hidden_states.index_select(0, order // chosen)
    if experts.has_gate:
        x = experts._apply_gate(_linear(experts, "gate_up_proj", x, counts))
    else:
        x = experts.act_fn(_linear(experts, "up_proj", x, counts))
    x = _linear(experts, "down_proj", x, counts)
    if getattr(experts, "has_post_expert_norm", False):
        x = experts.post_expert_norm(x)
    x = x * top_k_weights.reshape(-1).index_select(0, order)[:, None]
    parts = torch.empty_like(x, dtype=torch.float32).index_copy_(0, order, x.float()).view(rows, chosen, -1)
    total = parts[:, 0]
    for nth in range(1, chosen):
        total = total + parts[:, nth]
    return total.to(hidden_states.dtype)


def _linear(experts: Any, name: str, x: Tensor, counts: Tensor) -> Tensor:
    weight = getattr(experts, name)
    if experts.is_transposed:
        weight = weight.transpose(1, 2)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return BatchInvariantMode.current().grouped(x, weight, bias, counts)


ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
