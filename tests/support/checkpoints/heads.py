"""Tiny random EAGLE and EAGLE-3 heads, written as they are published: config.json by hand, tensors by name.

A head is written for a target's folder, whose sizes it takes over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401
import numpy as np
import safetensors.numpy

from tests.support.tiny import write_model

Tensors = dict[str, np.ndarray]

HEADS, KV_HEADS, DIM, INNER = 4, 2, 16, 64


def write_head(folder: Path, config: dict[str, Any], tensors: Tensors, *, torch_file: bool = False) -> Path:
    """Write a checkpoint. torch_file: as pytorch_model.bin, by torch itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if torch_file:
        import torch

        state = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
        torch.save(state, folder / "pytorch_model.bin")
    else:
        tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}  # it writes memory as it lies
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def target_facts(target: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((target / "config.json").read_text())
    return raw


def _random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    scale = 1.0 / np.sqrt(shape[-1]) if len(shape) > 1 else 0.1
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def layer_tensors(
    rng: np.random.Generator, prefix: str, hidden: int, width: int, *norms: str, bias: bool = False
) -> Tensors:
    """A layer's tensors. width: of attention's input; norms: names of those of `hidden` numbers."""
    sizes = {
        "self_attn.q_proj": (HEADS * DIM, width), "self_attn.k_proj": (KV_HEADS * DIM, width),
        "self_attn.v_proj": (KV_HEADS * DIM, width), "self_attn.o_proj": (hidden, HEADS * DIM),
        "mlp.gate_proj": (INNER, hidden), "mlp.up_proj": (INNER, hidden), "mlp.down_proj": (hidden, INNER),
    }  # fmt: skip
    tensors = {f"{prefix}{name}.weight": _random(rng, *size) for name, size in sizes.items()}
    if bias:
        tensors |= {f"{prefix}{name}.bias": _random(rng, size[0]) for name, size in list(sizes.items())[:3]}
    return tensors | {f"{prefix}{norm}.weight": 1 + _random(rng, hidden) for norm in norms}


def _config(target: dict[str, Any], hidden: int, **more: Any) -> dict[str, Any]:
    common = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": INNER, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": DIM, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
        "vocab_size": target["vocab_size"], "hidden_act": "silu", "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "torch_dtype": "float16",
    }  # fmt: skip
    return {key: value for key, value in (common | more).items() if value != "absent"}


def eagle(target: Path, seed: int = 0, *, layers: int = 1, bias: bool = True, qkv_bias: bool = False, **config: Any):
    """Configuration and tensors of an EAGLE-1 or -2 head. config: keys to set; "absent" leaves one out."""
    rng, facts = np.random.default_rng(seed), target_facts(target)
    hidden = facts["hidden_size"]
    tensors: Tensors = {"fc.weight": _random(rng, hidden, 2 * hidden)}
    if bias:
        tensors["fc.bias"] = _random(rng, hidden)
    for i in range(layers):
        norms = ("post_attention_layernorm", *(("input_layernorm",) if i else ()))
        tensors |= layer_tensors(rng, f"layers.{i}.", hidden, hidden, *norms, bias=qkv_bias)
    settings = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "bias": bias} | config
    return _config(facts, hidden, **settings), tensors


def eagle3(
    target: Path, seed: int = 0, *, layers: int = 1, hidden: int | None = None, vocab: int | None = 200,
    states: int = 3, first: str = "midlayer.", **config: Any,
):  # fmt: skip
    """Configuration and tensors of an EAGLE-3 head. vocab: entries of its own head, None for the target's."""
    rng, facts = np.random.default_rng(seed), target_facts(target)
    width = facts["hidden_size"]
    hidden = hidden or width
    tensors: Tensors = {"fc.weight": _random(rng, hidden, states * width), "norm.weight": 1 + _random(rng, hidden)}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors |= layer_tensors(rng, first, hidden, 2 * hidden, *norms)
    for i in range(1, layers):
        tensors |= layer_tensors(rng, f"layers.{i}.", hidden, hidden, *norms[1:])
    if vocab is not None:
        chosen = np.sort(rng.choice(facts["vocab_size"], vocab, replace=False))
        tensors["lm_head.weight"] = _random(rng, vocab, hidden) * 4
        tensors["d2t"] = chosen - np.arange(vocab)
        tensors["t2d"] = np.isin(np.arange(facts["vocab_size"]), chosen)
    if hidden != width:
        tensors["embed_tokens.weight"] = _random(rng, facts["vocab_size"], hidden)
        config["target_hidden_size"] = width
    settings = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": layers, "draft_vocab_size": vocab}
    return _config(facts, hidden, **(settings | config)), tensors


def parallel(target: Path, seed: int = 0, *, states: int = 3, **config: Any):
    """Configuration and tensors of a P-EAGLE head of two layers, with an embedding of its own."""
    settings = {"layers": 2, "pard_token": 4, "norm_before_fc": True, "para_num": 5} | config
    made, tensors = eagle3(target, seed, states=states, **settings)
    rng, facts = np.random.default_rng(seed + 1), target_facts(target)
    width = states * facts["hidden_size"]
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] *= 4  # sure enough for whole blocks
    tensors |= {"mask_hidden": _random(rng, 1, width) * 10, "norm_before_fc.weight": 1 + _random(rng, width)}
    return made, tensors | {"embed_tokens.weight": _random(rng, facts["vocab_size"], facts["hidden_size"]) * 5}


MAKERS = {"EAGLE": eagle, "EAGLE3": eagle3}


def write_pair(folder: Path, kind: str, **config: Any) -> tuple[Path, Path, tuple[dict[str, Any], Tensors]]:
    """A target whose head is its own, and a head for it. Returns both folders, and configuration and tensors."""
    target = write_model(folder / "target", tie_word_embeddings=False)
    made = MAKERS[kind](target, **config)
    return target, write_head(folder / "head", *made), made
