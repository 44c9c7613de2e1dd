"""The fusion layer, which makes a feature from the target's hidden states, for drafts that apply it themselves.

Params: `fuse` [n * Ht, H] and optionally `fuse_bias` [H]; before it the norms `state_norm_0` [Ht] and so on, or
`whole_norm` [n * Ht]. Their number format is the draft's; matrices may be quantized or packed (matrices/products.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from numpy.typing import NDArray

from services.draft.kernels.base import Backend
from services.draft.model.layers.heads import rms_norm
from services.draft.model.matrices.products import product
from services.draft.model.params import Params
from services.draft.model.weights.tensors import Tensors


@dataclass(frozen=True)
class Fusion:
    """A fusion layer. states: n, concatenated in rows of `width` numbers; epsilon: of norms. A static argument."""

    states: int
    width: int
    epsilon: float

    def __call__(self, params: Params, rows: jax.Array) -> jax.Array:
        """The features of rows. rows: [..., n * Ht]. Returns [..., H] in the rows' number format."""
        x = rows
        if "state_norm_0" in params:
            parts = enumerate(jnp.split(x, self.states, axis=-1))
            normed = [rms_norm(part, params[f"state_norm_{i}"], self.epsilon) for i, part in parts]
            x = jnp.concatenate(normed, axis=-1)
        if "whole_norm" in params:
            x = rms_norm(x, params["whole_norm"], self.epsilon)
        x = product(x, params["fuse"])
        return x + params["fuse_bias"] if "fuse_bias" in params else x


def read_fusion(tensors: Tensors, states: int) -> dict[str, NDArray[Any]]:
    """Params of a fusion by the names that FeatureSpec defines, in the file's number format."""
    names = {"fuse_bias": "fc.bias", "whole_norm": "norm_before_fc.weight"}
    names |= {f"state_norm_{i}": f"fc_norm.{i}.weight" for i in range(states)}
    params = {param: tensors.read(name) for param, name in names.items() if name in tensors}
    return params | {"fuse": tensors.read("fc.weight").T}


def compiled_fusion(backend: Backend) -> Any:
    """The fusion as a program. Arguments: Fusion, number format, params, rows [..., n * Ht]. Returns float32."""
    return _FUSIONS["cpu" if backend == "cpu" else "other"]


def _fused(fusion: Fusion, dtype: Any, params: Params, rows: jax.Array) -> jax.Array:
    return fusion(params, rows.astype(dtype)).astype(jnp.float32)


_jit = partial(jax.jit, static_argnums=(0, 1))
_FUSIONS = {"other": _jit(_fused), "cpu": _jit(_fused, compiler_options={"xla_cpu_multi_thread_eigen": False})}
