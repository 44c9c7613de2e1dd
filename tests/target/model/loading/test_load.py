"""Loading: what does not fit is refused by name; what fits is described rightly; GGUF files become folders."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from services.target.kernels.pools import LayerShape
from services.target.model.loading.load import load, pick_device
from services.target.process.service import describe
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.tiny import VOCAB, write_model, write_tokenizer

CPU = TargetConfig(device="cpu")


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_facts_of_a_model(tmp_path):
    model = load_model(write_model(tmp_path, num_hidden_layers=3))
    assert model.architecture == "LlamaForCausalLM"
    assert (model.vocab_size, model.context_length, model.eos_token_ids) == (VOCAB, 512, (1,))
    assert model.shapes == (LayerShape(2, 16, 16),) * 3
    assert model.dtype == model.cache_dtype == torch.float32


def test_several_eos_ids_and_a_shorter_context(tmp_path):
    folder = write_model(tmp_path)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [1, 7]}))
    model = load(folder, TargetConfig(device="cpu", context_length=100))
    assert model.eos_token_ids == (1, 7)
    assert engine_of(model).sessions.longest == 100


@pytest.mark.parametrize("ids", [-1, [-1, None], VOCAB, [VOCAB, 1 << 40]])
def test_ends_that_are_no_tokens_end_nothing(tmp_path, ids):
    folder = write_tokenizer(write_model(tmp_path))
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": ids}))
    model = load_model(folder)
    assert model.eos_token_ids == (1,)  # the tokenizer's
    info = describe(folder, engine_of(model), TargetConfig(model_path=str(folder))).info
    assert list(info.eos_token_ids) == [1]


@pytest.mark.parametrize(("message", "ends"), [
    ("<|assistant|>", (1, 7, 3)),
    ({"content": "<|assistant|>", "lstrip": False}, (1, 7, 3)),
    ("<|end|>", (1, 7)),
    ("<|nowhere|>", (1, 7)),
    (None, (1, 7)),
])  # fmt: skip
def test_the_tokenizers_end_ends_a_text_too(tmp_path, message, ends):
    """Models that learnt another format of chats often state its end there alone."""
    folder = write_tokenizer(write_model(tmp_path))
    stated = {"generation_config.json": {"eos_token_id": [1, 7]}, "tokenizer_config.json": {"eos_token": message}}
    for file, changes in stated.items():
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(settings | changes))
    assert load_model(folder).eos_token_ids == ends
    (folder / "tokenizer_config.json").write_text("{}")  # as older checkpoints have it
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": message}))
    assert load_model(folder).eos_token_ids == ends


@pytest.mark.parametrize(("flag", "stored", "expected"), [
    ("auto", torch.bfloat16, torch.float32), ("bfloat16", torch.float32, torch.bfloat16),
])  # fmt: skip
def test_dtype(tmp_path, flag, stored, expected):
    folder = write_model(tmp_path)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file({name: t.to(stored) for name, t in tensors.items()}, folder / "model.safetensors")
    model = load(folder, TargetConfig(device="cpu", dtype=flag))
    assert model.dtype == expected
    assert len(run(engine_of(model), [opening(1, [5, 6, 7])]).new[1]) == 24


def test_sharded_weights(tmp_path):
    whole = write_model(tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    request = opening(1, [5, 6, 7])
    texts = [run(engine_of(load_model(folder)), [request]).new for folder in (whole, tmp_path / "shards")]
    assert texts[0] == texts[1]
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="lacks weight files"):
        load_model(tmp_path / "shards")


def test_missing_tensors_are_named(tmp_path):
    folder = write_model(tmp_path)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks tensors .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)


def test_tensors_of_the_wrong_shape_are_refused(tmp_path):
    folder = write_model(tmp_path)
    edit_config(folder, intermediate_size=80)
    with pytest.raises(ConfigError):
        load_model(folder)


def test_missing_weights_are_refused(tmp_path):
    folder = write_model(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        load_model(folder)


def test_damaged_weights_are_refused(tmp_path):
    folder = write_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"no tensors at all")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(folder)


def test_unknown_architectures_are_refused(tmp_path):
    folder = write_model(tmp_path)
    edit_config(folder, model_type="cathedral")
    with pytest.raises(ConfigError, match="cathedral"):
        load_model(folder)


def test_models_without_paged_attention_are_refused(tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    settings = MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1)
    MambaForCausalLM(settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError):
        load_model(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 513])
def test_a_context_beyond_the_models_positions_is_refused(tmp_path, length):
    with pytest.raises(ConfigError, match=r"--context-length .*512"):
        load(write_model(tmp_path), TargetConfig(device="cpu", context_length=length))


def test_rope_that_depends_on_the_batch_is_kept_below_its_change(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    folder = write_model(tmp_path, rope_parameters=rope)
    assert load_model(folder).context_length == 128
    with pytest.raises(ConfigError, match="RoPE"):
        load(folder, TargetConfig(device="cpu", context_length=256))


@pytest.mark.parametrize("backend", ["auto", "torch_native"])
def test_longrope_turns_all_texts_as_long_ones_if_some_are_to_be(tmp_path, backend):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 128, "factor": 4.0}  # fmt: skip
    folder = write_model(tmp_path / "as it is", rope_parameters=rope)
    long = write_model(tmp_path / "long", rope_parameters=rope | {"short_factor": rope["long_factor"]})
    usual, stretched = (load_model(folder, context_length=n, attention_backend=backend) for n in (None, 400))
    assert (usual.context_length, stretched.context_length) == (128, 400)
    prompts = [np.random.default_rng(length).integers(4, VOCAB, length).tolist() for length in (30, 200)]
    texts = run(engine_of(stretched), [opening(i, prompt) for i, prompt in enumerate(prompts)]).new
    module = AutoModelForCausalLM.from_pretrained(long, dtype=torch.float32)
    for i, prompt in enumerate(prompts):
        reported = module.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=None)
        assert texts[i] == reported[0, len(prompt) :].tolist()
    assert run(engine_of(usual), [opening(0, prompts[0])]).new[0] != texts[0]
    with pytest.raises(ConfigError, match=r"--context-length .*512"):
        load_model(folder, context_length=513)


@pytest.mark.parametrize(("rope", "usual", "longest"), [
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048, 2048),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512, 512),  # already multiplied
    ({"rope_type": "yarn", "factor": 1.0}, 512, 512),
    ({"rope_type": "linear", "factor": 4.0}, 512, 2048),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 128}, 512, 512),
])  # fmt: skip
def test_scaled_rope_reaches_further_than_the_positions_say(tmp_path, rope, usual, longest):
    """As models' pages have one add it to config.json, beside max_position_embeddings as they were."""
    folder = write_model(tmp_path)
    edit_config(folder, rope_scaling=rope, rope_parameters=None)
    assert load_model(folder).context_length == usual
    assert load_model(folder, context_length=longest).context_length == longest
    with pytest.raises(ConfigError, match=f"--context-length .*{longest}"):
        load_model(folder, context_length=longest + 1)


@pytest.mark.parametrize("kinds", [("dynamic", "default"), ("default", "dynamic")])
def test_rope_of_one_kind_of_layers_that_depends_on_the_batch_is_kept_below_its_change(tmp_path, kinds):
    types = ("full_attention", "sliding_attention")
    common = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    rope = {name: {"rope_type": kind} | common for name, kind in zip(types, kinds, strict=True)}
    folder = write_model(tmp_path, "gemma3_text", rope_parameters=rope, layer_types=list(types), sliding_window=24)
    assert load_model(folder).context_length == 128


@pytest.mark.parametrize("name", ["abacus", "cuda:99", "meta"])
def test_devices_that_are_not_there_are_refused(name):
    with pytest.raises(ConfigError, match=name):
        pick_device(name)
