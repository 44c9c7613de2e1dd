"""Quantized matrices: 8-bit numbers with a scale for each output, dequantized in the product.

    int8    the largest number of a column is 127
    fp8     the largest number of a column is 448, the largest of e4m3
    int4    the head in int8; the other matrices are quantized when the compiled CPU kernels pack them (packed.py)

Norms, biases, embeddings, routers and the small matrices of latent attention stay in the draft's number format. A head
that is tied to the embedding is quantized as both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from services.draft.model.params import Params

MATRICES = {
    "head", "fuse", "qkv", "output", "gate_up", "down", "query", "query_down", "latent", "shared_gate_up",
    "shared_down", "experts_gate_up", "experts_down",
}  # fmt: skip
"""Names of the parameters that are quantized and packed."""

_KINDS = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}
_NONE = "unquant"
INT4 = "int4"


class QuantizedWeight(NamedTuple):
    """numbers: [..., I, O] int8 or float8; scales: [..., O] float32."""

    numbers: jax.Array
    scales: jax.Array

    def __getitem__(self, index: Any) -> Any:  # of experts
        return QuantizedWeight(self.numbers[index], self.scales[index])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.numbers.shape


def quantization_format(kind: str | None) -> str | None:
    """The format that a flag's value stands for; None if weights are not quantized."""
    return None if kind == _NONE else kind


def quantize_params(params: Params, kind: str | None) -> Params:
    """The same parameters with quantized matrices. kind: "int8", "fp8" or "int4"; None and "unquant" change nothing."""
    chosen = quantization_format(kind)
    if chosen is None:
        return params
    return {name: _quantized(name, value, chosen) for name, value in params.items()}


def _quantized(name: str, value: Any, kind: str) -> Any:
    if isinstance(value, list):
        return [quantize_params(part, kind) for part in value]
    if kind == INT4:
        return _quantize(value, "int8") if name == "head" else value
    return _quantize(value, kind) if name in MATRICES else value


def _quantize(matrix: jax.Array, kind: str) -> QuantizedWeight:
    dtype, largest = _KINDS[kind]
    wide = matrix.astype(jnp.float32)
    scales = jnp.maximum(jnp.abs(wide).max(axis=-2), 1e-12) / largest
    numbers = wide / scales[..., None, :]
    return QuantizedWeight((jnp.round(numbers) if kind == "int8" else numbers).astype(dtype), scales)
