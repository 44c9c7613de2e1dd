"""The rotary embedding by the parameters in config.json: the usual one, and that of Llama 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_THETA = 10_000.0  # where config.json has none
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class UnknownRotary(Exception):
    """The rotary embedding is another one, which the message names."""


def rope_parameters(content: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, by the names of `transformers` 5, from its form of config.json or an earlier one.

    Raises UnknownRotary.
    """
    found = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise UnknownRotary("its rotary embedding is written in another form")
    kind = found.get("rope_type") or found.get("type") or "default"
    names = _LLAMA3 if kind == "llama3" else ()
    if kind not in ("default", "llama3") or set(found) - {"rope_type", "type", "rope_theta", *names}:
        raise UnknownRotary(f"its rotary embedding is of type {kind!r:.40}")
    given = [one["rope_theta"] for one in (found, content) if one.get("rope_theta") is not None]
    if len(set(given)) > 1:
        raise UnknownRotary("it has two bases of its rotary embedding")
    base = _positive("rope_theta", given[0] if given else _THETA)
    return {"rope_type": kind, "rope_theta": base} | {name: _positive(name, found.get(name)) for name in names}


def _positive(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0.0 < value < math.inf:
        raise UnknownRotary(f"its {name} is {value!r:.40}")
    return float(value)


class Rotary:
    """The rotary embedding, called as that of `transformers`, with the same results."""

    def __init__(self, rope: Mapping[str, Any], head_dim: int) -> None:
        """rope: as `rope_parameters` returns them."""
        self._frequencies = _inverse_frequencies(rope, head_dim)

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [1, T, head_dim] each, in the format of `like`. positions: [1, T]"""
        angles = positions[..., None].float() * self._frequencies
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(like.dtype), both.sin().to(like.dtype)


def _inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """[head_dim / 2] float32."""
    plain: Tensor = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))
    if rope["rope_type"] == "default":
        return plain
    factor, low, high, trained = (rope[name] for name in _LLAMA3)
    lengths = 2 * math.pi / plain
    scaled = torch.where(lengths > trained / low, plain / factor, plain)
    smooth = (trained / lengths - low) / (high - low)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    is_between = ~(lengths < trained / high) * ~(lengths > trained / low)
    return torch.where(is_between, between, scaled)
