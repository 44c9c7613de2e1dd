"""Rotary position embeddings: the supported kinds, and the angles by position and pair of dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. kind: "default", "linear", "llama3" or "yarn".

    factor:      extension of the context length; not of "default"
    low_freq_factor, high_freq_factor: of "llama3". beta_fast, beta_slow, truncate: of "yarn"
    original_context: context length in tokens before the extension; of "llama3" and "yarn"
    amplitude:   factor of cosines and sines
    share:       fraction of each head that is rotated, its first dimensions
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    share: float = 1.0

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """Radians a position for each rotated pair of dimensions. [head_dim * share / 2] float32."""
        rotated = int(head_dim * self.share)
        inverse = self.theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
        if self.kind == "linear":
            inverse = inverse / self.factor
        elif self.kind == "llama3":
            inverse = self._llama3(inverse)
        elif self.kind == "yarn":
            inverse = self._yarn(inverse, rotated)
        return inverse.astype(np.float32)

    def _llama3(self, inverse: NDArray[np.float64]) -> NDArray[np.float64]:
        # Low frequencies are divided by the factor, high ones stay, those between are blended.
        wavelengths = 2 * math.pi / inverse
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = (self.original_context / wavelengths - low) / (high - low)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * inverse / self.factor + smooth * inverse

    def _yarn(self, inverse: NDArray[np.float64], rotated: int) -> NDArray[np.float64]:
        # The same by the number of turns within the original context, between beta_fast and beta_slow.
        def pair_that_turns(times: float) -> float:
            wavelengths = math.log(self.original_context / (times * 2 * math.pi))
            return rotated * wavelengths / (2 * math.log(self.theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        slowed: NDArray[np.float64] = np.clip((np.arange(rotated // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return slowed * inverse / self.factor + (1 - slowed) * inverse


def yarn_amplitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's mscale: the factor of attention for an extension of the context length."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_of(raw: dict[str, Any]) -> Rope:
    """The rotary embedding of a config.json. Raises ConfigError for an unsupported kind."""
    scaling = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    share = float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)
    # Text has the same position in all of mrope's dimensions; "dynamic" differs only beyond this context length.
    if kind in ("default", "mrope", "dynamic"):
        return Rope(theta, share=share)
    if kind == "linear":
        return Rope(theta, kind, float(scaling["factor"]), share=share)
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            float(scaling["factor"]),
            float(scaling["low_freq_factor"]),
            float(scaling["high_freq_factor"]),
            int(scaling["original_max_position_embeddings"]),
            share=share,
        )
    if kind == "yarn":
        return _yarn_of(scaling, theta, share, int(raw.get("max_position_embeddings", 2048)))
    raise ConfigError(
        f"the draft model's rope type {kind!r} is not supported; expected default, linear, dynamic, llama3 or yarn"
    )


def _yarn_of(scaling: dict[str, Any], theta: float, share: float, context: int) -> Rope:
    factor = float(scaling["factor"])
    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        weight, whole = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if weight and whole:
            amplitude = yarn_amplitude(factor, weight) / yarn_amplitude(factor, whole)
        else:
            amplitude = yarn_amplitude(factor)
    return Rope(
        theta,
        "yarn",
        factor,
        original_context=int(scaling.get("original_max_position_embeddings") or context),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        amplitude=float(amplitude),
        share=share,
    )
