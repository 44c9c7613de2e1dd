"""MTP layers of a checkpoint in further training, and their way back into the layout in which they were published.

Embedding and head are the target's and stay. The new folder has the MTP layer's tensors alone, under the names that the
checkpoint has for them, in bfloat16: it is served as it is, and its tensors can take the place of the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from services.draft.formats.base import DraftCheckpoint
from services.draft.formats.mtp import MtpLayout, published_names
from services.draft.formats.target import TargetCheckpoint
from services.draft.learning.algorithms.llama_layers import write_folder
from services.draft.learning.algorithms.published import PublishedHead, joined_tensors
from services.draft.model.layers.config import Attention, Experts, LatentAttention, Mlp

_FIRST = "mtp.0."


class PublishedMtp(PublishedHead):
    """An MTP layer in any published layout; the target's own head reads its states."""

    mlps, attentions = (Mlp, Experts), (Attention, LatentAttention)
    layout: MtpLayout
    names: Mapping[str, str]

    def __init__(self, folder: Path, target: TargetCheckpoint, draft: DraftCheckpoint) -> None:
        """As of PublishedHead."""
        super().__init__(folder, target, draft)
        self.layout, self.names = published_names(folder)
        layer = self.model.layers[0]
        if isinstance(layer.mlp, Experts):  # for gradients, a loop of fixed length
            self.model = replace(self.model, layers=(replace(layer, mlp=replace(layer.mlp, all_computed=True)),))
        a = layer.attention
        if isinstance(a, Attention) and (a.value_dim not in (None, a.head_dim) or a.value_scale != 1):
            raise ConfigError(
                f"{folder} has an MTP layer whose values are narrower than its keys; such are not trained"
            )

    def tensors(self, params: Mapping[str, Any], stored: set[str]) -> dict[str, Any]:
        """As of PublishedHead, by the names of DeepSeek's layout."""
        del stored
        offset, own = np.float32(self.layout.norm_offset), params["layers"][0]
        fuse = np.asarray(params["fuse"]).T
        if self.layout.feature_first:
            fuse = np.concatenate(np.split(fuse, 2, axis=1)[::-1], axis=1)
        found: dict[str, Any] = {"eh_proj.weight": fuse} | joined_tensors(self.model.layers[0], own, "")
        for param, name in (("embedding_norm", "enorm"), ("feature_norm", "hnorm"), ("norm", "norm")):
            found[f"{name}.weight"] = np.asarray(params[param]) - offset
        norms = {
            "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "mlp_norm": "post_attention_layernorm",
            "attention_norm": "input_layernorm",
        }  # fmt: skip
        found |= {f"{name}.weight": np.asarray(own[norm]) - offset for norm, name in norms.items() if norm in own}
        if isinstance(self.model.layers[0].mlp, Experts):
            found |= _experts_tensors(self.model.layers[0].mlp, own)
        if isinstance(self.model.layers[0].attention, LatentAttention):
            found |= _latent_tensors(self.model.layers[0].attention, own)
        return {_FIRST + name: tensor for name, tensor in found.items()}

    def publish(self, params: Mapping[str, Any], ids: NDArray[np.int64], folder: Path) -> None:
        """Write config.json and model.safetensors, each whole or not at all."""
        del ids
        learnt = self.tensors(params, set())
        exact = {name for name in learnt if name.endswith(_EXACT)}
        named = {self.names[known]: np.asarray(tensor) for known, tensor in learnt.items() if known not in exact}
        whole = {self.names[known]: np.ascontiguousarray(learnt[known], np.float32) for known in exact}
        config = {name: value for name, value in self.config.items() if name != "quantization_config"}
        write_folder(folder, config, named, whole)


_EXACT = ("e_score_correction_bias",)


def _experts_tensors(experts: Experts, own: Mapping[str, Any]) -> dict[str, Any]:
    """The published tensors of a mixture of experts, [out, in]."""
    found: dict[str, Any] = {"mlp.gate.weight": np.asarray(own["router"]).T}
    if experts.sigmoid:
        found["mlp.gate.e_score_correction_bias"] = np.asarray(own["router_bias"])
    gate_up, down = np.asarray(own["experts_gate_up"]), np.asarray(own["experts_down"])
    if experts.joined:
        found |= {"mlp.experts.gate_up_proj": gate_up.swapaxes(1, 2), "mlp.experts.down_proj": down.swapaxes(1, 2)}
    else:
        for i in range(experts.count):
            gate, up = np.split(gate_up[i].T, 2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[i].T}
            found |= {f"mlp.experts.{i}.{name}.weight": part for name, part in parts.items()}
    if experts.shared:
        gate, up = np.split(np.asarray(own["shared_gate_up"]).T, 2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": np.asarray(own["shared_down"]).T}
        found |= {f"mlp.shared_experts.{name}.weight": part for name, part in parts.items()}
    if experts.shared_gate:
        found["mlp.shared_expert_gate.weight"] = np.asarray(own["shared_gate"]).T
    return found


def _latent_tensors(a: LatentAttention, own: Mapping[str, Any]) -> dict[str, Any]:
    """The published tensors of latent attention, [out, in], but for the output's."""
    query = np.asarray(own["query"]).T
    each = _side_by_side(query.reshape(a.heads, -1, query.shape[1]), a.plain_dim, a.interleaved)
    expand = np.concatenate([np.asarray(own["keys"]), np.asarray(own["values"]).swapaxes(1, 2)], axis=1)
    found = {
        "self_attn.kv_a_layernorm.weight": own["latent_norm"],
        "self_attn.kv_b_proj.weight": expand.reshape(-1, a.rank),
        f"self_attn.{'q_b_proj' if a.query_rank else 'q_proj'}.weight": each.reshape(query.shape),
    }
    for param, kind in (("latent", "weight"), ("latent_bias", "bias")):
        if param in own:
            rows = _side_by_side(np.asarray(own[param]).T[None], a.rank, a.interleaved)[0]
            found[f"self_attn.kv_a_proj_with_mqa.{kind}"] = rows
    if a.query_rank:
        found |= {
            "self_attn.q_a_layernorm.weight": own["query_norm"],
            "self_attn.q_a_proj.weight": np.asarray(own["query_down"]).T,
        }
        if "query_down_bias" in own:
            found["self_attn.q_a_proj.bias"] = own["query_down_bias"]
    return found


def _side_by_side(rows: NDArray[Any], first: int, interleaved: bool) -> NDArray[Any]:
    """Undoes arrays._in_halves: pairs that are rotated together are side by side again. rows: [heads, n, ...]."""
    if not interleaved:
        return rows
    found, half = rows.copy(), (rows.shape[1] - first) // 2
    found[:, first::2], found[:, first + 1 :: 2] = rows[:, first : first + half], rows[:, first + half :]
    return found
