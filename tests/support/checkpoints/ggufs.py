"""Writes a tiny checkpoint as a GGUF file, as llama.cpp's converter lays it out, with a byte-level vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import safetensors.torch
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import pre_tokenizers

from bench.checkpoints.blocks import random_rows
from tests.support.tiny import VOCAB

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3, "phi3": gguf.MODEL_ARCH.PHI3,
}  # fmt: skip


def write_gguf(
    file: Path,
    folder: Path,
    plain: Path,
    kind: Type | Callable[[str], Type] = Type.F32,
    scaling: tuple[str, float] | None = None,
    ends: Sequence[str] = (),
    pre: str | None = None,
    begins: bool | None = None,
    dtype: torch.dtype = torch.bfloat16,
    pieces: bool = False,
):
    """The model of `folder` as a GGUF file, its projections as a quantized type; `plain` gets what the file stands for.

    kind: of the projections, or of each tensor by its name in `folder`; Q5_K and Q6_K are random
    dtype: of the tensors of `plain`
    scaling: RoPE scaling as fields, its type and factor
    ends: further control tokens, from 260 on
    pre: how texts are split, by name
    begins: whether prompts begin with a token, if the file sets it
    pieces: the vocabulary is one of pieces with scores, as of Llama 2, not of bytes
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    _write_fields(writer, config)
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling[0]))
        writer.add_rope_scaling_factor(scaling[1])
    (_write_pieces if pieces else _write_vocabulary)(writer, ends)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if begins is not None:
        writer.add_add_bos_token(begins)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    stands_for = {}
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        array = tensor.float().numpy()
        projection = name.endswith("_proj.weight")
        quantized = kind(name) if callable(kind) else kind if projection else Type.F32
        raw, meant = _quantized(_permuted(array, name, config), quantized)
        if name.endswith("norm.weight") and architecture == gguf.MODEL_ARCH.GEMMA3:
            raw, meant = raw + 1, raw + 1 - 1  # llama.cpp has Gemma's norms multiply by the weight itself
        stands_for[name] = torch.from_numpy(_permuted(meant, name, config, back=True)).to(dtype)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(target, np.ascontiguousarray(raw), raw_dtype=quantized)
    factors = _llama3_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in stands_for.items()}
    safetensors.torch.save_file(contiguous, plain / "model.safetensors", {"format": "pt"})


def _write_fields(writer: gguf.GGUFWriter, config) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(VOCAB)
    if config.get("pad_token_id") is not None:
        writer.add_pad_token_id(config["pad_token_id"])
    if config["model_type"] in ("gemma3_text", "phi3"):
        writer.add_sliding_window(config["sliding_window"])


def _write_vocabulary(writer: gguf.GGUFWriter, ends: Sequence[str]) -> None:
    words = ["<|begin|>", "<|finish|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", *ends]
    words += [f"<|unused{i}|>" for i in range(len(words), VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3 if len(word) > 1 and word.startswith("<") else 1 for word in words])
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0].content }}")


def _write_pieces(writer: gguf.GGUFWriter, ends: Sequence[str]) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁he", "he", "▁hel", "el", "▁h", "▁", "e",
             "h", "l", *ends]  # fmt: skip
    words += [f"<|unused{i}|>" for i in range(len(words), VOCAB)]
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, **dict.fromkeys(ends, 4)}
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0 if i < 259 else -float(i - 259) for i in range(len(words))])
    writer.add_token_types([6 if word.startswith("<0x") else kinds.get(word, 1) for word in words])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")


def _permuted(array: np.ndarray, name: str, config, back: bool = False) -> np.ndarray:
    """Llama's GGUF pairs neighbouring rows for RoPE where safetensors pairs halves."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if config["model_type"] != "llama" or heads is None:
        return array
    halves = (config[heads], -1, 2) if back else (config[heads], 2, -1)
    return array.reshape(*halves, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _llama3_factors(config) -> np.ndarray | None:
    """The RoPE factors that llama.cpp's converter stores for Llama 3.1, by its own loop."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    factors = []
    for frequency in 1.0 / config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim):
        wave = 2 * np.pi / frequency
        if wave < high:
            factors.append(1.0)
        elif wave > low:
            factors.append(scaling["factor"])
        else:
            smooth = scaling["original_max_position_embeddings"] / wave - scaling["low_freq_factor"]
            smooth /= scaling["high_freq_factor"] - scaling["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def _quantized(array: np.ndarray, kind: Type) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of an array as a type, and what they stand for."""
    if kind == Type.F32:
        return array, array
    if kind == Type.Q4_K:
        return _q4_k(array)
    if kind in (Type.Q5_K, Type.Q6_K):
        raw = random_rows(kind, *array.shape, float(array.std()), np.random.default_rng(array.shape))
        return raw, gguf.quants.dequantize(raw, kind)
    raw = gguf.quants.quantize(array, kind)
    return raw, gguf.quants.dequantize(raw, kind)


def _q4_k(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 256 in eight parts: w = d * scale * q - dmin * least, with 6 bits a scale and least, 4 bits a q.

    Bytes of a block: d, dmin (float16), 12 of scales and leasts, 128 of q: part 2i in the low nibbles, 2i + 1 high.
    """
    parts = array.reshape(-1, 8, 32)
    least = np.maximum(-parts.min(-1), 0)
    step = (parts.max(-1) + least) / 15
    d = (step.max(-1, keepdims=True) / 63).astype(np.float16)
    dmin = (least.max(-1, keepdims=True) / 63).astype(np.float16)
    scales = np.round(step / d).clip(0, 63).astype(np.uint8)  # [blocks, 8]
    leasts = np.round(least / np.maximum(dmin, 1e-8)).clip(0, 63).astype(np.uint8)
    unit, offset = d.astype(np.float32) * scales, dmin.astype(np.float32) * leasts
    q = np.round((parts + offset[..., None]) / np.maximum(unit, 1e-8)[..., None]).clip(0, 15).astype(np.uint8)
    meant = (unit[..., None] * q - offset[..., None]).reshape(array.shape)
    first = (scales[:, :4] & 63) | (scales[:, 4:] >> 4 << 6)
    second = (leasts[:, :4] & 63) | (leasts[:, 4:] >> 4 << 6)
    third = (scales[:, 4:] & 15) | (leasts[:, 4:] << 4)
    nibbles = (q[:, 0::2] | q[:, 1::2] << 4).reshape(len(q), -1)
    raw = np.concatenate([d.view(np.uint8), dmin.view(np.uint8), first, second, third, nibbles], axis=1)
    return raw.reshape(array.shape[0], -1), meant.astype(np.float32)
