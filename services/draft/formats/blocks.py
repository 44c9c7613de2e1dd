"""Attention and feed-forward part of a decoder layer, from the keys of config.json and the names of its tensors."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from outrider.errors import ConfigError
from services.draft.model.layers.config import Attention, Experts, LatentAttention, Mlp, attention_of
from services.draft.model.layers.rope import rope_of, yarn_amplitude

# Model types whose attention is gated; Qwen3.5 has a key for it, too.
_GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def attention_part(raw: dict[str, Any], names: Set[str], index: int = 0) -> Attention | LatentAttention:
    """Attention of a layer. names: its tensors; index: its number among the MTP layers. Raises KeyError for a missing
    key."""
    if "self_attn.g_proj.weight" in names:
        return _of_step(raw, raw["num_hidden_layers"] + index)
    if "self_attn.kv_b_proj.weight" in names:
        return _latent(raw)
    if "swa_num_key_value_heads" in raw:
        return _windowed(raw, names)
    gated = raw.get("attn_output_gate", raw.get("model_type") in _GATED)
    if gated:
        raw = {"partial_rotary_factor": 0.25} | raw
    return attention_of(
        raw,
        qkv_bias=bool(raw.get("attention_bias", "self_attn.q_proj.bias" in names)),
        output_bias="self_attn.o_proj.bias" in names,
        qk_norm=bool(raw.get("use_qk_norm", "self_attn.q_norm.weight" in names)),
        gated=bool(gated),
    )


def _latent(raw: dict[str, Any]) -> LatentAttention:
    rope = rope_of(raw | {"partial_rotary_factor": None})  # the rotated part has dimensions of its own
    plain, rotary = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
    scaling = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    scale = float((plain + rotary) ** -0.5)
    if rope.kind != "default" and scaling.get("mscale_all_dim"):
        scale *= yarn_amplitude(rope.factor, scaling["mscale_all_dim"]) ** 2
    return LatentAttention(
        width=raw["hidden_size"],
        heads=raw["num_attention_heads"],
        query_rank=raw.get("q_lora_rank") or 0,
        rank=raw["kv_lora_rank"],
        plain_dim=plain,
        rotary_dim=rotary,
        value_dim=raw["v_head_dim"],
        rope=rope,
        scale=scale,
        bias=bool(raw.get("attention_bias", False)),
        interleaved=bool(raw.get("rope_interleave", True)),
    )


def _windowed(raw: dict[str, Any], names: Set[str]) -> Attention:
    """MiMo-V2: MTP layers are built like the model's sliding-window layers."""
    rotation = raw | {"rope_theta": raw.get("swa_rope_theta") or raw.get("rope_theta"), "rope_parameters": None}
    dim = raw.get("swa_head_dim") or raw["head_dim"]
    previous = raw.get("sliding_window_size")  # does not count the token itself
    return Attention(
        width=raw["hidden_size"],
        heads=raw.get("swa_num_attention_heads") or raw["num_attention_heads"],
        kv_heads=raw["swa_num_key_value_heads"],
        head_dim=dim,
        rope=rope_of(rotation),
        qkv_bias=bool(raw.get("attention_bias", "self_attn.q_proj.bias" in names)),
        output_bias="self_attn.o_proj.bias" in names,
        window=previous + 1 if previous else raw["sliding_window"],
        sinks=bool(raw.get("add_swa_attention_sink_bias", "self_attn.sinks" in names)),
        value_dim=raw.get("swa_v_head_dim") or raw.get("v_head_dim") or dim,
        value_scale=float(raw.get("attention_value_scale") or 1.0),
    )


def _of_step(raw: dict[str, Any], number: int) -> Attention:
    """Step-3.5: lists have an entry a layer, MTP layers included. number: of the layer."""

    def listed(name: str, default: Any) -> Any:
        value = raw.get(name)
        if not isinstance(value, list):
            return default if value is None else value
        return value[number] if number < len(value) else default

    kind = listed("layer_types", "sliding_attention")
    sliding = kind == "sliding_attention"
    own = (raw.get("attention_other_setting") or {}) if sliding else {}
    scaled = kind in (raw.get("yarn_only_types") or (kind,))
    rotation = {
        "rope_theta": listed("rope_theta", None),
        "partial_rotary_factor": listed("partial_rotary_factors", 1.0),
        "rope_scaling": raw.get("rope_scaling") if scaled else None,
    }
    return Attention(
        width=raw["hidden_size"],
        heads=own.get("num_attention_heads") or raw["num_attention_heads"],
        kv_heads=own.get("num_attention_groups") or raw.get("num_attention_groups") or raw["num_key_value_heads"],
        head_dim=own.get("head_dim") or raw["head_dim"],
        rope=rope_of(rotation) if listed("use_rope_layers", True) else None,
        qk_norm=True,
        gated=True,
        head_gate=True,
        window=raw.get("sliding_window") if sliding else None,
    )


def feed_forward_part(raw: dict[str, Any], names: Set[str], index: int = 0) -> Mlp | Experts:
    """Feed-forward part of a layer. Arguments as of `attention_part`. Raises ConfigError for an unknown activation."""
    limits = raw.get("swiglu_limits_shared") or ()
    number = raw.get("num_hidden_layers", 0) + index
    if number < len(limits) and limits[number]:
        raise ConfigError(f"swiglu_limits_shared bounds MTP layer {index}, which is not supported")
    if "mlp.gate_proj.weight" in names:
        return Mlp(raw["intermediate_size"], "mlp.gate_proj.bias" in names)
    # DeepSeek and Qwen name the number of experts differently.
    deepseek = "n_routed_experts" in raw
    sigmoid = raw.get("scoring_func", "sigmoid" if deepseek else "softmax") == "sigmoid"
    width = raw["moe_intermediate_size"]
    shared = width * (raw.get("n_shared_experts") or 0) if deepseek else raw.get("shared_expert_intermediate_size") or 0
    return Experts(
        count=raw["n_routed_experts"] if deepseek else raw["num_experts"],
        width=width,
        chosen=raw["num_experts_per_tok"],
        shared=shared,
        sigmoid=sigmoid,
        groups=raw.get("n_group") or 1,
        kept=raw.get("topk_group") or 1,
        normed=bool(raw.get("norm_topk_prob", True)),
        scaling=float(raw.get("routed_scaling_factor") or 1.0) if sigmoid else 1.0,
        shared_gate=bool(shared) and not deepseek,
        joined="mlp.experts.gate_up_proj" in names,
    )
