"""Parameters whose matrices are packed into panels for the compiled CPU kernels (kernels/cpu/panels.py)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from services.draft.kernels.cpu.panels import PanelMaker
from services.draft.model.matrices.quantized import MATRICES, QuantizedWeight
from services.draft.model.params import Params


def pack_params(params: Params, maker: PanelMaker | None = None) -> Params:
    """The same parameters with packed matrices, except for fp8, which the kernels do not support."""
    maker = maker or PanelMaker()
    return {name: _packed(name, value, maker) for name, value in params.items()}


def _packed(name: str, value: Any, maker: PanelMaker) -> Any:
    if isinstance(value, list):
        return [pack_params(part, maker) for part in value]
    if name not in MATRICES:
        return value
    if not isinstance(value, QuantizedWeight):
        return maker.make(value)
    return maker.make(value.numbers, value.scales) if value.numbers.dtype == jnp.int8 else value
