"""Tiny DFlash block drafters, written as they are published: random ones, and one that foretells a repeated text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.checkpoints.heads import DIM, HEADS, INNER, KV_HEADS, Tensors, target_facts, write_head
from tests.support.checkpoints.perfect import CYCLE

# Of DFlash 2.
SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}
MASK = 4  # no text has this token
_SHARP = 8.0  # weight of the norms of queries and keys


def dflash(target: Path, seed: int = 0, *, layers: int = 2, states: tuple[int, ...] = (0, 1), **config: Any):
    """Configuration and tensors of a random drafter. states: target layers; config: keys of dflash_config to set."""
    rng, facts = np.random.default_rng(seed), target_facts(target)
    hidden = facts["hidden_size"]

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm(width: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(width)).astype(np.float32)

    heads = config.pop("num_key_value_heads", KV_HEADS)
    tensors: Tensors = {
        "fc.weight": matrix(hidden, len(states) * hidden), "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }  # fmt: skip
    for i in range(layers):
        layer = {
            "self_attn.q_proj": matrix(HEADS * DIM, hidden), "self_attn.k_proj": matrix(heads * DIM, hidden),
            "self_attn.v_proj": matrix(heads * DIM, hidden), "self_attn.o_proj": matrix(hidden, HEADS * DIM),
            "self_attn.q_norm": norm(DIM), "self_attn.k_norm": norm(DIM),
            "mlp.gate_proj": matrix(INNER, hidden), "mlp.up_proj": matrix(INNER, hidden),
            "mlp.down_proj": matrix(hidden, INNER), "input_layernorm": norm(hidden),
            "post_attention_layernorm": norm(hidden),
        }  # fmt: skip
        tensors |= {f"layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
        if taps := config.get("conv_kernel_size"):
            for part in ("attention_conv", "mlp_conv"):
                groups = hidden // config["conv_group_size"]
                tensors[f"layers.{i}.{part}.kernel_projection.weight"] = 0.3 * matrix(2 * taps * groups, hidden)
                kernel = 0.3 * rng.standard_normal((2, taps, hidden))
                kernel[:, 0] += 1
                tensors[f"layers.{i}.{part}.base_kernel"] = kernel.astype(np.float32)
    if rank := config.get("selector_rank"):
        tensors["candidate_selector.hidden_projection.weight"] = matrix(rank, hidden)
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}"] = rng.standard_normal((facts["vocab_size"], rank)).astype(np.float32)
    settings = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": heads, "head_dim": DIM,
        "num_hidden_layers": layers, "rms_norm_eps": 1e-6, "vocab_size": facts["vocab_size"], "hidden_act": "silu",
        "max_position_embeddings": 2048, "rope_theta": 10000.0, "attention_bias": False, "block_size": 8,
        "num_target_layers": facts["num_hidden_layers"], "layer_types": ["full_attention"] * layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(states)},
    }  # fmt: skip
    own = {key: config.pop(key) for key in tuple(config) if key in settings or key in ("is_causal", "sliding_window")}
    settings |= own
    settings["dflash_config"] |= config
    return settings, tensors


def write_perfect_dflash(folder: Path, target: Path, **config: Any) -> Path:
    """A drafter of a cyclic target that foretells text which contains the whole cycle.

    Every position attends to the feature one cycle and one token before it: that is the embedding of the token before
    the one to predict, of which the target's own head makes that token. A feature at another row, or a block at another
    position, gives another token.
    """
    settings, tensors = dflash(target, layers=1, states=(1, 3, 5), num_key_value_heads=HEADS, **config)
    hidden = settings["hidden_size"]
    for name, tensor in tensors.items():
        tensors[name] = np.ones_like(tensor) if "norm" in name else np.zeros_like(tensor)
    half, lag, layer = DIM // 2, len(CYCLE) + 1, "layers.0.self_attn."
    angle = lag * settings["rope_theta"] ** -(np.arange(half) / half)
    key, query = np.repeat([1.0, 0.0], half), np.concatenate([np.cos(angle), -np.sin(angle)])
    for name, each in (("q_proj", query), ("k_proj", key)):
        tensors[f"{layer}{name}.weight"][:, 0] = np.tile(each, HEADS)  # number 0 of all embeddings is 1
    for name in ("q_norm", "k_norm"):
        tensors[f"{layer}{name}.weight"] *= _SHARP
    same = np.eye(hidden, dtype=np.float32)
    tensors["fc.weight"] = np.concatenate([same / 3] * 3, axis=1)
    tensors[f"{layer}v_proj.weight"][:hidden] = same
    tensors[f"{layer}o_proj.weight"][:, :hidden] = 10 * same  # beside it, the mask's own embedding is small
    return write_head(folder, settings, tensors)
