"""Feed-forward part of a layer: one gated block, or a mixture of experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from services.draft.model.layers.config import Activation, Experts, Mlp
from services.draft.model.matrices.products import linear, product


def feed_forward(description: Mlp | Experts, layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """The output of the feed-forward part for normed states x [S, Q, H]."""
    if isinstance(description, Mlp):
        return _gated(x, layer, "gate_up", "down", description.activation)
    rows = x.reshape(-1, x.shape[-1])
    mixed = _mix(rows, layer, *route(description, layer, rows), description)
    if description.shared:
        shared = _gated(rows, layer, "shared_gate_up", "shared_down")
        if description.shared_gate:
            shared = shared * jax.nn.sigmoid(rows @ layer["shared_gate"])
        mixed = mixed + shared
    return mixed.reshape(x.shape)


def _gated(x: jax.Array, layer: dict[str, Any], gate_up: str, down: str, activation: Activation = "silu") -> jax.Array:
    gate, up = jnp.split(linear(x, layer, gate_up), 2, axis=-1)
    gate = jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)
    return linear(gate * up, layer, down)


def route(description: Experts, layer: dict[str, Any], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The experts of each row, [N, chosen] int32, and their weights, [N, chosen] float32. x: [N, H].

    Computed in float32, because a rounded logit could choose another expert.
    """
    logits = x.astype(jnp.float32) @ layer["router"].astype(jnp.float32)
    if description.sigmoid:
        scores = jax.nn.sigmoid(logits)
        wanted = _in_best_groups(description, scores + layer["router_bias"])
    else:
        wanted = scores = jax.nn.softmax(logits, axis=-1)
    chosen = lax.top_k(wanted, description.chosen)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if description.normed:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * description.scaling


def _in_best_groups(description: Experts, wanted: jax.Array) -> jax.Array:
    """Scores with -inf outside the best groups. The value of a group is the sum of its two best experts' scores."""
    if description.kept == description.groups:
        return wanted
    grouped = wanted.reshape(len(wanted), description.groups, -1)
    value = lax.top_k(grouped, 2)[0].sum(axis=-1)
    best = lax.top_k(value, description.kept)[1]
    kept = jnp.zeros(value.shape, bool).at[jnp.arange(len(wanted))[:, None], best].set(True)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(wanted.shape)


def _mix(x: jax.Array, layer: dict[str, Any], chosen: jax.Array, weights: jax.Array, description: Experts) -> jax.Array:
    """The weighted sum of the chosen experts' outputs for each row, [N, H].

    A loop over the experts that any row has chosen: their weights are read once, those of the others never. With the
    few rows of an expansion that is the whole cost of a step. Each expert computes all rows, which wastes work in
    prompt chunks.
    """
    count = description.count
    used = jnp.zeros(count, bool).at[chosen.reshape(-1)].set(True)
    order = jnp.argsort(~used)  # used experts first
    share = jnp.zeros((len(x), count), jnp.float32).at[jnp.arange(len(x))[:, None], chosen].set(weights)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        expert = order[i]
        gate, up = jnp.split(product(x, layer["experts_gate_up"][expert]), 2, axis=-1)
        output = product(jax.nn.silu(gate) * up, layer["experts_down"][expert])
        return total + share[:, expert, None] * output

    turns = count if description.all_computed else used.sum()
    total: jax.Array = lax.fori_loop(0, turns, add, jnp.zeros(x.shape, jnp.float32))
    return total.astype(x.dtype)
