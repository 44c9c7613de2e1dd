"""Tiny random checkpoints of many families, with published configurations and tensor names.

`config.json` is written by hand, with the keys of the published checkpoint; `transformers` makes the tensors from it
and names them. Norms, biases and routers are random too, so that nothing of a layer is a no-op.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests.support.tiny import EOS, VOCAB

_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.35,
    "bos_token_id": 0, "eos_token_id": EOS, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_SHARED_EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
                   "topk_group": 1, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1}  # fmt: skip

_LINEAR = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
           "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
_QWEN35 = {"head_dim": 16, "attn_output_gate": True, "mtp_num_hidden_layers": 1, "rope_theta": "absent",
           "rope_scaling": "absent",
           "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                               "mrope_interleaved": True, "mrope_section": [2, 1, 1]}}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A published shape: its config.json and some tensors that only it has."""

    config: dict[str, Any]
    tensors: tuple[str, ...] = ()
    shards: bool = False
    remote: bool = False
    code: dict[str, str] = field(default_factory=dict)  # file name -> text


def _family(architecture: str, model_type: str, *tensors: str, shards: bool = False, **config: Any) -> Family:
    settings = {"architectures": [architecture], "model_type": model_type} | _COMMON | config
    return Family({key: value for key, value in settings.items() if value != "absent"}, tensors, shards)


_MIMO_CONFIGURATION = """
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"

    def __init__(self, *args, num_nextn_predict_layers=0, **kwargs):
        self.num_nextn_predict_layers = num_nextn_predict_layers
        super().__init__(*args, **kwargs)
"""
_MIMO_MODELING = """
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention, Qwen2ForCausalLM, Qwen2MLP, Qwen2Model, Qwen2RMSNorm,
)

from .configuration_mimo import MiMoConfig


class MiMoMTPLayers(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Qwen2RMSNorm(size, eps=eps)
        self.post_attention_layernorm = Qwen2RMSNorm(size, eps=eps)
        self.token_layernorm = Qwen2RMSNorm(size, eps=eps)
        self.hidden_layernorm = Qwen2RMSNorm(size, eps=eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.final_layernorm = Qwen2RMSNorm(size, eps=eps)
        self.self_attn = Qwen2Attention(config, layer_idx=0)
        self.mlp = Qwen2MLP(config)


class MiMoModel(Qwen2Model):
    config_class = MiMoConfig

    def __init__(self, config):
        super().__init__(config)
        self.mtp_layers = nn.ModuleList([MiMoMTPLayers(config) for _ in range(config.num_nextn_predict_layers)])


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig

    def __init__(self, config):
        super(Qwen2ForCausalLM, self).__init__(config)
        self.model = MiMoModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
"""

_STEP_CONFIGURATION = """
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig


class Step3p5Config(Step3p7TextConfig):
    model_type = "step3p5"
"""
_STEP_MODELING = """
from torch import nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

from .configuration_step3p5 import Step3p5Config


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    config_class = Step3p5Config
    config: Step3p5Config

    def __init__(self, config):
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, logits_to_keep=0, **kwargs):
        states = self.model(input_ids=input_ids, **kwargs)[0]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(states[:, kept]))
"""

FAMILIES: dict[str, Family] = {
    "llama-2": _family("LlamaForCausalLM", "llama", num_key_value_heads=4, pretraining_tp=1),
    "llama-3.1": _family(
        "LlamaForCausalLM", "llama", "model.layers.2.mlp.gate_proj.weight", shards=True, rope_theta=500000.0,
        rope_scaling={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 64, "rope_type": "llama3"},
        eos_token_id=[EOS, 2], attention_bias=False, mlp_bias=False,
    ),
    "qwen2.5": _family(
        "Qwen2ForCausalLM", "qwen2", "model.layers.0.self_attn.q_proj.bias", rope_theta=1000000.0,
        sliding_window=131072, max_window_layers=3, use_sliding_window=False, tie_word_embeddings=True,
    ),
    "qwen3": _family("Qwen3ForCausalLM", "qwen3", "model.layers.0.self_attn.q_norm.weight", head_dim=16,
                     sliding_window=None, use_sliding_window=False, max_window_layers=3, attention_bias=False),
    "qwen3-moe": _family(
        "Qwen3MoeForCausalLM", "qwen3_moe", "model.layers.1.mlp.experts.3.gate_proj.weight",
        "model.layers.1.mlp.gate.weight",
        head_dim=16, num_experts=8, decoder_sparse_step=1, mlp_only_layers=[], **_MOE,
    ),
    "mistral": _family("MistralForCausalLM", "mistral", sliding_window=24),
    "gemma-3": _family(
        "Gemma3ForCausalLM", "gemma3_text", "model.layers.0.pre_feedforward_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight", num_hidden_layers=6, head_dim=16,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=16, rope_theta=1000000.0,
        rope_local_base_freq=10000.0, sliding_window=24, sliding_window_pattern=3, cache_implementation="hybrid",
        tie_word_embeddings=True, attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=False,
        pad_token_id=0,
    ),
    "deepseek-v3": _family(
        "DeepseekV3ForCausalLM", "deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "model.layers.2.mlp.experts.7.down_proj.weight",
        "model.layers.2.mlp.shared_experts.up_proj.weight", "model.layers.0.self_attn.q_b_proj.weight",
        q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, num_key_value_heads=4,
        rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 4, "mscale": 1.0, "mscale_all_dim": 1.0,
                      "original_max_position_embeddings": 128, "type": "yarn"},
        scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, ep_size=1, attention_bias=False,
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config",
                  "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        **_SHARED_EXPERTS, **_MOE,
    ),
    "glm-4.5": _family(
        "Glm4MoeForCausalLM", "glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.experts.7.up_proj.weight", "model.layers.0.self_attn.k_norm.weight",
        head_dim=16, partial_rotary_factor=0.5, attention_bias=True, use_qk_norm=True, **_SHARED_EXPERTS, **_MOE,
    ),
    "mimo": Family(
        {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1,
         "attention_bias": True, "head_dim": 16, "max_window_layers": 3, "sliding_window": 512,
         "use_sliding_window": False,
         "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig", "AutoModel": "modeling_mimo.MiMoModel",
                      "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}} | _COMMON,
        ("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.self_attn.q_proj.bias"),
        remote=True,
        code={"configuration_mimo.py": _MIMO_CONFIGURATION, "modeling_mimo.py": _MIMO_MODELING},
    ),
    "gpt-oss": _family(
        "GptOssForCausalLM", "gpt_oss", "model.layers.0.self_attn.sinks", "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.router.weight", num_hidden_layers=4, head_dim=16, num_local_experts=4, experts_per_token=2,
        num_experts_per_tok=2, sliding_window=24, swiglu_limit=7.0, attention_bias=True, initial_context_length=128,
        layer_types=["sliding_attention", "full_attention"] * 2, rope_theta=150000,
        rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 128,
                      "rope_type": "yarn", "truncate": False},
    ),
    "phi-3": _family("Phi3ForCausalLM", "phi3", "model.layers.0.self_attn.qkv_proj.weight",
                     "model.layers.0.mlp.gate_up_proj.weight",
                     sliding_window=24, original_max_position_embeddings=512, pad_token_id=0),
    "smollm3": _family("SmolLM3ForCausalLM", "smollm3", no_rope_layers=[1, 1, 0],
                       no_rope_layer_interval=3, pad_token_id=0),
    "olmo-2": _family("Olmo2ForCausalLM", "olmo2", "model.layers.0.post_feedforward_layernorm.weight", pad_token_id=0),
    "granite": _family("GraniteForCausalLM", "granite", attention_multiplier=0.2, embedding_multiplier=3.0,
                       logits_scaling=2.0, residual_multiplier=0.5),
    "cohere-2": _family("Cohere2ForCausalLM", "cohere2", head_dim=16, logit_scale=0.25, sliding_window=24,
                        sliding_window_pattern=3, layer_norm_eps=1e-5, tie_word_embeddings=True, pad_token_id=0),
    "mimo-v2": _family(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash", "model.layers.2.self_attn.attention_sink_bias",
        num_key_value_heads=1, swa_num_key_value_heads=2, swa_num_attention_heads=4, head_dim=24, swa_head_dim=24,
        v_head_dim=20, swa_v_head_dim=20, partial_rotary_factor=0.334, rope_theta=5000000, swa_rope_theta=10000,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"], sliding_window=8,
        sliding_window_size=8, attention_value_scale=0.707, add_swa_attention_sink_bias=True, layernorm_epsilon=1e-5,
        mlp_layer_types=["dense", "sparse", "dense"], attention_bias=False, n_routed_experts=4, n_group=1, topk_group=1,
        scoring_func="sigmoid", topk_method="noaux_tc", rope_scaling="absent", **_MOE,
    ),
    "step-3.5": Family(
        {"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "num_nextn_predict_layers": 3,
         "auto_map": {"AutoConfig": "configuration_step3p5.Step3p5Config",
                      "AutoModelForCausalLM": "modeling_step3p5.Step3p5ForCausalLM"}} | _COMMON | {
         "head_dim": 16, "num_attention_groups": 2, "sliding_window": 8, "use_head_wise_attn_gate": True,
         "layer_types": ["full_attention", *["sliding_attention"] * 5],
         "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6,
                                     "num_attention_groups": 2, "head_dim": 16, "true_head_dim": 16},
         "rope_theta": [1000000.0, *[10000.0] * 5], "partial_rotary_factors": [0.5, *[1.0] * 5],
         "yarn_only_types": ["full_attention"], "moe_layers_enum": "", "swiglu_limits": [0.0] * 6,
         "swiglu_limits_shared": [0.0] * 6, "use_rope_layers": [], "pad_token_id": 0},
        ("model.layers.0.self_attn.g_proj.weight", "model.layers.2.self_attn.q_norm.weight"),
        remote=True,
        code={"configuration_step3p5.py": _STEP_CONFIGURATION, "modeling_step3p5.py": _STEP_MODELING},
    ),
}  # fmt: skip
# Families that are refused as targets, whose MTP layers are read all the same.
DRAFTING: dict[str, Family] = {
    "qwen3-next": _family(
        "Qwen3NextForCausalLM", "qwen3_next", "model.layers.1.mlp.shared_expert_gate.weight",
        "model.layers.1.mlp.experts.3.gate_proj.weight",
        head_dim=16,
        partial_rotary_factor=0.25, num_experts=8, shared_expert_intermediate_size=24, decoder_sparse_step=1,
        mlp_only_layers=[], attention_bias=False, **_LINEAR, **_MOE,
    ),
    "qwen3.5": _family("Qwen3_5ForCausalLM", "qwen3_5_text", **_QWEN35, **_LINEAR),
    "qwen3.5-moe": _family(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=24, intermediate_size="absent", **_QWEN35, **_LINEAR,
    ),
}  # fmt: skip


def write_family(folder: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    """Write the checkpoint of a family. changes: of its configuration. Returns the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family = FAMILIES.get(name) or DRAFTING[name]
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in family.code.items():
        (folder / file).write_text(text)
    config = json.dumps(family.config | changes, indent=1)
    (folder / "config.json").write_text(config)
    settings = AutoConfig.from_pretrained(folder, trust_remote_code=family.remote)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, trust_remote_code=family.remote)
    _randomize(model)
    model.save_pretrained(folder, **({"max_shard_size": "60KB"} if family.shards else {}))
    (folder / "config.json").write_text(config)  # save_pretrained has its own mind about keys
    names = tensor_names(folder)
    assert changes or set(family.tensors) <= names, set(family.tensors) - names
    return folder


def _randomize(model: torch.nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("norm.weight", "bias", "sinks")):
            tensor.data += 0.1 * torch.randn_like(tensor)
        if name.endswith("post_feedforward_layernorm.weight"):  # else a tied embedding repeats its token for ever
            tensor.data += 20.0


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors in the folder's weight files."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as tensors:
            names.update(tensors.keys())
    return names


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put further tensors into a folder's only weight file."""
    file = folder / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(file) | tensors, file, {"format": "pt"})


def mtp_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """A multi-token-prediction layer behind the last one, as DeepSeek-V3 and GLM-4.5 publish it: a decoder layer and
    what joins it to embedding and head."""
    config = json.loads((folder / "config.json").read_text())
    layers, size = config["num_hidden_layers"], config["hidden_size"]
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    last, extra = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    layer = {name.replace(last, extra): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    return layer | {
        f"{extra}enorm.weight": torch.ones(size),
        f"{extra}hnorm.weight": torch.ones(size),
        f"{extra}eh_proj.weight": torch.zeros(size, 2 * size),
        f"{extra}shared_head.norm.weight": torch.ones(size),
        f"{extra}shared_head.head.weight": tensors["lm_head.weight"].clone(),
        f"{extra}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
