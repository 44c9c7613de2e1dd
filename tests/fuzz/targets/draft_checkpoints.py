"""config.json of drafts and targets: each reader describes a model, or raises ConfigError."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from outrider.checkpoints import checkpoint
from outrider.checkpoints.drafts import kind_of_draft
from outrider.checkpoints.sizes import CheckpointSizes
from outrider.checkpoints.vocabulary import of_checkpoint
from outrider.errors import ConfigError
from services.draft.formats.decoders import read_decoder
from services.draft.formats.eagle import read_eagle
from services.draft.formats.eagle3 import read_eagle3
from services.draft.formats.mtp import read_mtp
from services.draft.formats.target import read_target, target_logits
from tests.fuzz.choices import Choices, as_json

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-")
_GOOD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16, "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip
_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM",
                  "Gemma3ForCausalLM", "SmolLM3ForCausalLM", "LlamaForCausalLMEagle3", "Unknown")  # fmt: skip
_KEYS = (*_GOOD, "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "draft_vocab_size", "text_config",
         "eagle_config", "transformer_layer_config", "num_nextn_predict_layers", "quantization_config", "n_head",
         "no_rope_layers", "eagle_aux_hidden_state_layer_ids", "final_logit_softcapping", "q_lora_rank", "logit_scale",
         "kv_lora_rank", "n_routed_experts", "attention_bias", "query_pre_attn_scalar", "layer_types")  # fmt: skip
_SCALINGS = ({"rope_type": "llama3"}, {"rope_type": "yarn", "factor": 2.0}, {"type": "linear", "factor": 0},
             {"rope_type": "longrope", "short_factor": [1], "long_factor": None}, {"full_attention": {}},
             {"type": 5})  # fmt: skip
_TENSORS = {
    f"model.layers.0.{name}.weight": shape for name, shape in {
        "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8),
        "mlp.gate_proj": (8, 8), "mlp.up_proj": (8, 8), "mlp.down_proj": (8, 8), "input_layernorm": (8,),
        "post_attention_layernorm": (8,),
    }.items()
} | {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "fc.weight": (8, 24)}  # fmt: skip
_WEIGHTS = safetensors.numpy.save({name: np.zeros(shape, np.float32) for name, shape in _TENSORS.items()})


def fuzz(data: bytes) -> None:
    """The first byte chooses whether the rest is config.json or decisions about a good one."""
    choices, folder = Choices(data), Path(_FOLDER.name)
    config = as_json(_changed(choices)) if choices.chance(2) else choices.rest()
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(_WEIGHTS)
    (folder / "tokenizer.json").write_bytes(as_json(_tokenizer(choices)))
    for read in (_sizes, read_target, target_logits_of, kind_of_draft, _vocabulary, read_decoder, _heads):
        with contextlib.suppress(ConfigError):
            read(folder)


def seeds() -> list[bytes]:
    """Good configurations, and decisions."""
    return [b"\0" + json.dumps(_GOOD).encode(), bytes(2), bytes((1, 0)), bytes((1, *range(24)))]


def _changed(choices: Choices) -> Any:
    config = dict(_GOOD) | {"architectures": [choices.one(_ARCHITECTURES)]}
    for _ in range(choices.below(6)):
        key = choices.one(_KEYS)
        if choices.chance(6):
            config.pop(key, None)
        elif key in ("rope_scaling", "rope_parameters"):
            config[key] = choices.value(2) if choices.chance(3) else choices.one(_SCALINGS)
        elif key in ("text_config", "eagle_config", "transformer_layer_config"):
            config[key] = choices.value(1) if choices.chance(3) else dict(_GOOD)
        else:
            config[key] = choices.value(2)
    return config


def _tokenizer(choices: Choices) -> Any:
    content = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "c", "id": 2}]}
    if choices.chance(3):
        content[choices.one(("model", "added_tokens"))] = choices.value()
    return content


def target_logits_of(folder: Path) -> None:
    """Factor and softcap of the logits."""
    target_logits(read_target(folder))


def _sizes(folder: Path) -> None:
    sizes = CheckpointSizes(folder)
    sizes.weights(2, "int8")
    sizes.shared_weights(2, head=True)
    sizes.token_bytes(2)


def _vocabulary(folder: Path) -> None:
    of_checkpoint(folder, "model")
    checkpoint.vocabulary(folder)


def _heads(folder: Path) -> None:
    target = read_target(folder)
    for read in (read_eagle, read_eagle3):
        with contextlib.suppress(ConfigError):
            read(folder, target)
    read_mtp(folder, target)
