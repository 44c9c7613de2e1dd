"""Latent attention (MLA): the cache stores latents, from which the keys and values of all heads are computed.

DeepSeek-V2 and -V3, GLM-4.7-Flash, MiniCPM3 and others compute the keys and values of all heads from one latent c
[rank] and one rotary part r [rope] that the heads share: for head h, key = (A_h c, r) and value = B_h c. Then

    query . key = (A_h^T query_c, query_r) . (c, r)        sum of weights * value = B_h (sum of weights * c)

so attention with a single key head over (c, r), with values c, gives the same result after multiplying queries by A^T
and results by B. A token takes rank + rope numbers a layer: 576 in DeepSeek-V3 instead of 40960. Scores and sums are
over wider rows, which costs arithmetic: long prompts take longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_MARK = "_outrider_latent"


class _Projection(nn.Linear):
    """A and B stacked, [heads * (nope + value), rank]. A class of its own, because `linear.pack` must not pack it."""


@dataclass(frozen=True)
class Latent:
    """One layer's A and B, as views of its weight."""

    projection: nn.Linear
    nope: int
    value: int

    @property
    def _heads(self) -> Tensor:
        """[heads, nope + value, rank]."""
        heads: Tensor = self.projection.weight.unflatten(0, (-1, self.nope + self.value))
        return heads

    def queries(self, q: Tensor) -> Tensor:
        """q: [heads, T, nope + rope]. Returns [heads, T, rank + rope]."""
        keys = self._heads[:, : self.nope]
        return torch.cat([q[..., : self.nope] @ keys, q[..., self.nope :]], dim=-1)

    def values(self, attended: Tensor) -> Tensor:
        """attended: [T, heads, rank]. Returns [T, heads, value]."""
        values = self._heads[:, self.nope :]
        return (attended.transpose(0, 1) @ values.transpose(1, 2)).transpose(0, 1)


def install(module: nn.Module) -> int:
    """Make the MLA layers of a model pass latents to attention. Returns the number of layers changed."""
    found = 0
    layer: Any  # modules of `transformers`, whose attributes are replaced
    for layer in module.modules():
        latent = _latent(layer)
        if latent is not None:
            layer.kv_b_proj = latent.projection
            layer.expand_kv = _as_they_are
            setattr(layer, _MARK, latent)
            found += 1
    return found


def of(layer: nn.Module) -> Latent | None:
    """The latent projection that `install` found in an attention layer, or None."""
    return layer.__dict__.get(_MARK)


def _as_they_are(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces `expand_kv`: keys of a single head, and values that are their first part."""
    keys = torch.cat([latents, rotated], dim=-1)
    return keys, keys[..., : latents.shape[-1]]


def _latent(layer: Any) -> Latent | None:
    """A and B of a layer that computes keys and values from latents in this way; None for all others."""
    linear = getattr(layer, "kv_b_proj", None)
    if type(linear) is not nn.Linear or linear.bias is not None or type(linear.weight) is not nn.Parameter:
        return None  # not latent attention, or its weight is packed
    if not hasattr(layer, "expand_kv"):
        return None
    nope, rope, value = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim
    projection = _Projection(linear.in_features, linear.out_features, bias=False, device="meta")
    projection.weight = linear.weight
    latent = Latent(projection, nope, value)
    return latent if _agrees(layer, latent, rope) else None


@torch.inference_mode()
def _agrees(layer: Any, latent: Latent, rope: int) -> bool:
    """True if the layer's own expansion of one token equals that of A and B."""
    weight = latent.projection.weight
    c = torch.linspace(-1, 1, weight.shape[1], device=weight.device, dtype=weight.dtype)[None, None, None]
    r = torch.linspace(-1, 1, rope, device=weight.device, dtype=weight.dtype)[None, None, None]
    keys, values = layer.expand_kv(c, r)
    both = latent._heads @ c[0, 0, 0]
    return bool(
        keys.shape[-1] == latent.nope + rope
        and torch.allclose(keys[0, :, 0, : latent.nope], both[:, : latent.nope], rtol=0.05, atol=0.05)
        and torch.equal(keys[0, :, 0, latent.nope :], r[0, 0].expand(len(both), -1))
        and torch.allclose(values[0, :, 0], both[:, latent.nope :], rtol=0.05, atol=0.05)
    )
