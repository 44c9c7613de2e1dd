"""Checkpoints of headers alone, for what depends on shapes: large models without their bytes."""

import json
import struct


def write_header(folder, config, tensors):
    """A checkpoint whose weight file has a header, and zeros that take no room on the disk."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    packed = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(packed)) + packed)
        file.truncate(8 + len(packed) + end)
    return folder


def write_qwen(folder, hidden, inner, layers, heads, vocab=151_936):
    """Config and header of a dense Qwen3 with heads of 128 and 8 key-value heads."""
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": inner, "vocab_size": vocab, "max_position_embeddings": 40_960,
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for i in range(layers):
        part = f"model.layers.{i}."
        tensors |= {
            f"{part}self_attn.q_proj.weight": (heads * 128, hidden), f"{part}self_attn.k_proj.weight": (1024, hidden),
            f"{part}self_attn.v_proj.weight": (1024, hidden), f"{part}self_attn.o_proj.weight": (hidden, heads * 128),
            f"{part}mlp.gate_proj.weight": (inner, hidden), f"{part}mlp.up_proj.weight": (inner, hidden),
            f"{part}mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip
    return write_header(folder, config, tensors)
