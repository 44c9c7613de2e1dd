"""The dimensions of the models that GPUs are measured with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dimensions:
    """Of a Llama; by default of Llama-3.1-8B."""

    hidden: int = 4096
    inner: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256
