"""Tiny random checkpoints in the published formats, written by `transformers` and `tokenizers` themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 320
EOS = 1

_CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model(folder: Path, family: str = "llama", *, seed: int = 0, vocab: int = VOCAB, **options: Any) -> Path:
    """A random causal LM whose logits are well spread, so that its text is varied and argmaxes are clear.

    family: "llama", "qwen2" or "qwen3". Further options go into the configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": vocab, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.35,
        "bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **(sizes | options))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    return folder


def write_slower_twin(folder: Path, model: Path, width: int) -> Path:
    """A model with the same text as the Llama in another folder, but slower: parts of its layers are idle."""
    import torch
    from transformers import AutoModelForCausalLM

    twin = AutoModelForCausalLM.from_pretrained(model)
    for layer in twin.model.layers:
        mlp = layer.mlp
        for linear, side in ((mlp.gate_proj, 0), (mlp.up_proj, 0), (mlp.down_proj, 1)):
            idle = list(linear.weight.shape)
            idle[side] = width - idle[side]
            linear.weight = torch.nn.Parameter(torch.cat([linear.weight, torch.zeros(idle)], side))
    twin.config.intermediate_size = width
    twin.save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer: every byte is a token, no merges; ids 0 to 3 are special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    vocab |= {f"<|unused{i}|>": i for i in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": _CHAT, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
