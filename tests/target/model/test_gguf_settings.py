"""Settings of GGUF files: kept as published, or refused where they would change the text."""

import io
import json

import gguf
import numpy as np
import pytest
from gguf import GGUFReader
from rich.console import Console
from transformers import AutoConfig

from outrider.errors import ConfigError
from services.target.model.gguf import convert
from services.target.model.gguf import metadata as gguf_metadata
from tests.support.checkpoints.families import write_family
from tests.support.checkpoints.ggufs import write_gguf


def rope_of(tmp_path, family, scaling):
    write_gguf(tmp_path / "it.gguf", write_family(tmp_path / "original", family), tmp_path / "plain", scaling=scaling)
    convert.convert(tmp_path / "it.gguf", tmp_path / "out", Console(file=io.StringIO()))
    return json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]


@pytest.mark.parametrize(("layers", "scalar"), [(62, 24), (48, 16)])
def test_queries_of_the_largest_gemma_are_scaled_as_published(layers, scalar, tmp_path):
    """27B, which has 62 layers: by hidden size over heads. Others: by the width of a head."""
    sizes = {"head_dim": 16, "hidden_size": 96, "num_attention_heads": 4}
    write_gguf(tmp_path / "it.gguf", write_family(tmp_path / "original", "gemma-3", **sizes), tmp_path / "plain")
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=layers, **sizes)
    gguf_metadata.apply(GGUFReader(tmp_path / "it.gguf"), config)
    assert config.query_pre_attn_scalar == scalar


def test_scaling_of_long_contexts_is_kept(tmp_path):
    rope = rope_of(tmp_path, "qwen2.5", ("yarn", 4.0))
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 4.0)


def test_scaling_leaves_windows_alone(tmp_path):
    rope = rope_of(tmp_path, "gemma-3", ("linear", 8.0))
    assert (rope["full_attention"]["rope_type"], rope["full_attention"]["factor"]) == ("linear", 8.0)
    assert rope["sliding_attention"]["rope_type"] == "default"


def test_scaling_that_is_not_known_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="longrope"):
        rope_of(tmp_path, "qwen2.5", ("longrope", 4.0))


def facts_of(tmp_path, architecture, fields, tensors=()):
    """A file of fields alone; those without a dot in front are the architecture's."""
    writer = gguf.GGUFWriter(tmp_path / "facts.gguf", architecture)
    for name, value in fields.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(name.removeprefix(".") if name.startswith(".") else f"{architecture}.{name}", value)
    for name, tensor in dict(tensors).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFReader(tmp_path / "facts.gguf")


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 512,
         "pad_token_id": 0}  # fmt: skip


@pytest.mark.parametrize(("architecture", "model_type", "field", "value", "attribute", "expected"), [
    ("phi3", "phi3", "attention.sliding_window", 24, "sliding_window", 24),
    ("phi3", "phi3", "attention.sliding_window", 0, "sliding_window", None),
    ("gemma2", "gemma2", "attn_logit_softcapping", 7.0, "attn_logit_softcapping", 7.0),
    ("gemma2", "gemma2", "final_logit_softcapping", 7.0, "final_logit_softcapping", 7.0),
    ("qwen2moe", "qwen2_moe", "expert_feed_forward_length", 48, "moe_intermediate_size", 48),
    ("qwen2moe", "qwen2_moe", "expert_shared_feed_forward_length", 40, "shared_expert_intermediate_size", 40),
    ("qwen3moe", "qwen3_moe", "expert_feed_forward_length", 48, "moe_intermediate_size", 48),
    ("qwen2", "qwen2", "attention.key_length", 24, "head_dim", 24),
    ("starcoder2", "starcoder2", "rope.freq_base", 999999.0, "rope_theta", 999999.0),
    ("stablelm", "stablelm", "rope.freq_base", 40000.0, "rope_theta", 40000.0),
    ("stablelm", "stablelm", "rope.dimension_count", 8, "partial_rotary_factor", 0.5),
    ("nemotron", "nemotron", "rope.dimension_count", 4, "partial_rotary_factor", 0.25),
    ("phi3", "phi3", "rope.dimension_count", 12, "partial_rotary_factor", 0.75),
])  # fmt: skip
def test_settings_stated_by_a_file_are_kept(architecture, model_type, field, value, attribute, expected, tmp_path):
    config = AutoConfig.for_model(model_type, **SIZES)
    gguf_metadata.apply(facts_of(tmp_path, architecture, {field: value}), config)
    assert {**vars(config), **config.rope_parameters}[attribute] == expected


def test_factors_of_phi_3_for_short_and_long_texts_are_kept(tmp_path):
    factors = {f"rope_factors_{name}.weight": np.arange(1, 9, dtype=np.float32) * by
               for name, by in (("short", 1), ("long", 3))}  # fmt: skip
    fields = {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.25, "rope.dimension_count": 16}
    config = AutoConfig.for_model("phi3", **SIZES)
    gguf_metadata.apply(facts_of(tmp_path, "phi3", fields, factors), config)
    config.save_pretrained(tmp_path)
    rope = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert (rope["rope_type"], rope["original_max_position_embeddings"], rope["attention_factor"]) == (
        "longrope", 128, 1.25,
    )  # fmt: skip
    assert rope["short_factor"] == list(range(1, 9))
    assert rope["long_factor"] == list(range(3, 25, 3))


@pytest.mark.parametrize(("field", "value", "message"), [
    (".split.count", 3, "one of 3 parts.*--merge"), ("rope.dimension_count", 8, "rotates 8 of 16 .*safetensors"),
])  # fmt: skip
def test_files_that_would_change_the_text_are_rejected(field, value, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        gguf_metadata.apply(facts_of(tmp_path, "llama", {field: value}), AutoConfig.for_model("llama", **SIZES))
