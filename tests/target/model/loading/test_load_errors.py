"""Unsupported checkpoints are rejected at start-up, with a message that names the reason and a remedy."""

import json

import pytest
import safetensors.torch
import torch
import transformers

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from services.target.model.loading.load import load
from tests.support.tiny import VOCAB, write_model, write_tokenizer

CPU = TargetConfig(device="cpu")
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip


def write_config(folder, architecture, model_type, **settings):
    """A folder with a configuration, and weights that are never read."""
    folder.mkdir(exist_ok=True)
    config = {"architectures": [architecture], "model_type": model_type} | SIZES | settings
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize(("architecture", "settings", "message"), [
    ("Qwen3NextForCausalLM", {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
     r"1 of 2 layers are of type linear_attention.*choose a model"),
    ("Llama4ForCausalLM", {"model_type": "llama4_text", "layer_types": ["chunked_attention", "full_attention"]},
     r"chunked_attention.*choose a model"),
    ("Lfm2ForCausalLM", {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, r"conv.*choose a model"),
    ("DeepseekV32ForCausalLM", {"model_type": "deepseek_v32"}, r"indexed_attention.*choose a model"),
    ("Gemma4ForCausalLM", {"model_type": "gemma4_text", "num_kv_shared_layers": 1,
                           "layer_types": ["sliding_attention", "full_attention"]},
     r"1 layers share keys and values.*choose a model"),
    ("T5ForConditionalGeneration", {"model_type": "t5", "d_model": 32}, r"encoder-decoder.*decoder-only"),
    ("ViTForImageClassification", {"model_type": "vit"}, r"vit is no model that continues text.*causal"),
])  # fmt: skip
def test_unsupported_configurations_are_rejected(tmp_path, architecture, settings, message):
    folder = write_config(tmp_path / "model", architecture, **settings)
    with pytest.raises(ConfigError, match=message):
        load(folder, CPU)


def write_random(folder, model_type, **settings):
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | settings))
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


CONFIGURATION = """
from transformers import LlamaConfig


class ShiftConfig(LlamaConfig):
    model_type = "shift"
"""
MODELING = """
import torch
from transformers import LlamaForCausalLM

from .configuration_shift import ShiftConfig


class ShiftForCausalLM(LlamaForCausalLM):
    config_class = ShiftConfig

    def forward(self, input_ids, **kwargs):
        embeds = self.get_input_embeddings()(input_ids)
        return super().forward(inputs_embeds=embeds + torch.nn.functional.pad(embeds, (0, 0, 1, -1)), **kwargs)
"""


def test_a_state_beside_attention_is_noticed(tmp_path):
    """Each token's embedding is mixed with the one before; every layer attends through our interface all the same."""
    folder = write_model(tmp_path / "model")
    (folder / "configuration_shift.py").write_text(CONFIGURATION)
    (folder / "modeling_shift.py").write_text(MODELING)
    auto_map = {
        "AutoConfig": "configuration_shift.ShiftConfig",
        "AutoModelForCausalLM": "modeling_shift.ShiftForCausalLM",
    }
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "shift", "architectures": ["ShiftForCausalLM"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"ShiftForCausalLM carries a state.*choose a model"):
        load(folder, TargetConfig(device="cpu", trust_remote_code=True))


def test_a_table_of_attentions_of_its_own_is_noticed(tmp_path):
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.AutoConfig.for_model("falcon", **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"falcon does not use the attention interface.*choose another model"):
        load(tmp_path, CPU)


def test_attention_past_the_interface_is_noticed(tmp_path):
    folder = write_random(tmp_path / "model", "bloom", n_head=4, n_layer=2)
    with pytest.raises(ConfigError, match=r"BloomForCausalLM.*attention interface|BloomForCausalLM cannot be called"):
        load(folder, CPU)


def test_a_window_that_is_not_passed_to_attention_is_rejected(tmp_path):
    folder = write_random(tmp_path / "model", "phimoe", num_local_experts=4, num_experts_per_tok=2, sliding_window=24)
    with pytest.raises(ConfigError, match=r"PhimoeForCausalLM.* window of 24 tokens; choose --context-length 24"):
        load(folder, CPU)
    assert load(folder, TargetConfig(device="cpu", context_length=24)).context_length == 24
    folder = write_random(tmp_path / "wide", "phimoe", num_local_experts=4, num_experts_per_tok=2, sliding_window=128)
    assert load(folder, CPU).context_length == 128


def test_weights_that_overflow_are_noticed(tmp_path):
    folder = write_model(tmp_path / "model")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 1e38
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"not finite as float32; choose --dtype"):
        load(folder, TargetConfig(device="cpu", dtype="float32"))


def test_the_tokenizer_of_another_model_is_noticed(tmp_path):
    folder = write_tokenizer(write_model(tmp_path / "model", vocab=300))
    with pytest.raises(ConfigError, match=r"tokenizer\.json has 20 tokens past the model's vocabulary of 300"):
        load(folder, CPU)


def test_added_tokens_may_lie_past_the_vocabulary(tmp_path):
    folder = write_tokenizer(write_model(tmp_path / "model"))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": VOCAB, "content": "<image>"})
    file.write_text(json.dumps(content))
    assert load(folder, CPU).vocab_size == VOCAB
